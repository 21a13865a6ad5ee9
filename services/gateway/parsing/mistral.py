"""Calls as Mistral's models write them.

Up to version 7 of their tokenizers an array, [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]; from version 11 on
one by one, [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}, where the id, and with hidden special tokens both markers, may be
missing. Source: mistralai/mistral-common.
"""

from __future__ import annotations

import re
import string

from kvern.services.gateway.parsing.call_sequence import CallSequence
from kvern.services.gateway.parsing.calls import CallReader, Calls, ToolFormat
from kvern.services.gateway.parsing.json_scanner import SPACE, JsonScanner, Status
from kvern.services.gateway.parsing.pieces import Piece

_NAME = frozenset(string.ascii_letters + string.digits + "_-.")
_AFTER_NAME = re.compile(r"\s*(?:\[CALL_ID\][\w-]*\s*)?(?:\[ARGS\]\s*)?")
_MAX_AFTER_NAME = 256


class NamedCall:
    """Reads one call whose name stands before its arguments."""

    def __init__(self, calls: Calls, held: str) -> None:
        self.status = Status.OPEN
        self.held = held
        self._calls = calls
        self._name = ""
        self._after_name: str | None = None
        self._arguments: JsonScanner | None = None

    def read(self, text: str, position: int, out: list[Piece]) -> int:
        """Read on from `position`; return where the call ends or breaks, or the text's end."""
        while position < len(text) and self.status is Status.OPEN:
            if self._arguments is not None:
                return self._read_arguments(self._arguments, text, position, out)
            position = self._read_head(text, position, out)
        return position

    def cut_off(self) -> str:
        """Return what is content: nothing after the call's beginning."""
        return self.held

    def _read_head(self, text: str, position: int, out: list[Piece]) -> int:
        char = text[position]
        if self._after_name is None and char in _NAME:
            self._name += char
        elif char == "{" and self._is_head():
            self._calls.begin(self._name, out)
            self._arguments, self.held = JsonScanner(), ""
            return position
        elif char != "{" and self._name in self._calls.tools and len(self._after_name or "") < _MAX_AFTER_NAME:
            self._after_name = (self._after_name or "") + char
        else:
            self.status = Status.BROKEN
            return position
        self.held += char
        return position + 1

    def _is_head(self) -> bool:
        return self._name in self._calls.tools and _AFTER_NAME.fullmatch(self._after_name or "") is not None

    def _read_arguments(self, scanner: JsonScanner, text: str, position: int, out: list[Piece]) -> int:
        parts: list[str] = []
        end = scanner.scan(text, position, parts)
        self.status = scanner.status
        if end > position:
            self._calls.add_arguments("".join(parts), out)
        return end


class MistralCalls:
    """Reads whichever of the two forms comes."""

    def __init__(self, calls: Calls, held: str) -> None:
        self._calls = calls
        self._reader: CallReader | None = None
        self.status = Status.OPEN
        self.held = held

    def read(self, text: str, position: int, out: list[Piece]) -> int:
        """Read on from `position`; return where the calls end or break, or the text's end."""
        while self._reader is None and position < len(text):
            if text[position] in SPACE:
                self.held += text[position]
                position += 1
            else:
                form = CallSequence if text[position] in "[{" else NamedCall
                self._reader = form(self._calls, self.held)
        if self._reader is not None:
            position = self._reader.read(text, position, out)
            self.status, self.held = self._reader.status, self._reader.held
        return position

    def cut_off(self) -> str:
        """Return what is content."""
        return self.held if self._reader is None else self._reader.cut_off()


MISTRAL = ToolFormat(opening="[TOOL_CALLS]", closing="", reader=MistralCalls)
