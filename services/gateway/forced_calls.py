"""Outputs that are tool calls and nothing else, because a schema held them to that."""

from __future__ import annotations

import json
import re

from kvern.services.gateway.parsing import Piece, ToolCallArguments, ToolCallBegins

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=\{)')
"""Of one call in a list, up to its arguments, which are an object."""


class NamedCall:
    """The arguments of one tool, which the client named."""

    def __init__(self, name: str) -> None:
        self._begins: list[Piece] = [ToolCallBegins(0, name)]

    def push(self, text: str) -> list[Piece]:
        pieces, self._begins = self._begins, []
        return [*pieces, ToolCallArguments(0, text)]

    def finish(self) -> list[Piece]:
        return []


class ListedCalls:
    """A list of calls as `tools.schema_of_calls` has it, read as it comes."""

    def __init__(self) -> None:
        self._held = ""
        """What may become a call's head."""
        self._num_calls = 0
        self._arguments: _ObjectEnd | None = None
        """Of the call under way."""

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            text = self._read_head(text, pieces) if self._arguments is None else self._read_arguments(text, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        return []

    def _read_head(self, text: str, pieces: list[Piece]) -> str:
        self._held += text
        # Its last part is there when arguments begin, not before.
        if (head := _HEAD.search(self._held)) is None:
            return ""
        pieces.append(ToolCallBegins(self._num_calls, json.loads(head[1])))
        rest, self._held = self._held[head.end() :], ""
        self._arguments = _ObjectEnd()
        return rest

    def _read_arguments(self, text: str, pieces: list[Piece]) -> str:
        assert self._arguments is not None
        end = self._arguments.find(text)
        pieces.append(ToolCallArguments(self._num_calls, text[:end]))
        if end is None:
            return ""
        self._arguments = None
        self._num_calls += 1
        return text[end:]


class _ObjectEnd:
    """Finds where a JSON object ends that comes in pieces."""

    _MARKS = re.compile(r'["\\{}]')

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """Return where the object ends in its next piece, None if it goes on."""
        position = 0
        if self._escaped and text:
            self._escaped, position = False, 1
        while (mark := self._MARKS.search(text, position)) is not None:
            position = mark.end()
            match mark[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":  # only strings have it
                    self._escaped = position == len(text)
                    position += 1
                case "{" if not self._in_string:
                    self._depth += 1
                case "}" if not self._in_string:
                    self._depth -= 1
            if self._depth == 0:
                return position
        return None
