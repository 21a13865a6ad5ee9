"""Arguments that a model wrote as a JSON string holding an object."""

from __future__ import annotations

import json
import re

from kvern.services.gateway.parsing.json_scanner import SPACE, JsonScanner, Status

_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGINNING = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")


class QuotedObject:
    """Reads a JSON string, from its opening quote on; what it gives is the text of the object in it.

    Complete without having given anything is a string that holds whitespace at most.
    """

    def __init__(self) -> None:
        self.status = Status.OPEN
        self._is_in_string = False
        self._escape = ""
        self._object: JsonScanner | None = None

    def scan(self, text: str, position: int, out: list[str]) -> int:
        """Read one step on from `position`; append the object's text to `out`; return where the step ends.

        A step is either wholly appended to `out` or adds nothing to it. An escape is appended when it is whole.
        """
        if not self._is_in_string:
            self._is_in_string = True
            return position + 1
        if self._escape:
            return self._read_escape(text, position, out)
        plain = _PLAIN.match(text, position)
        if plain is not None:
            return position + self._read_object(plain.group(), out)
        if text[position] == "\\":
            self._escape = "\\"
            return position + 1
        return self._end(position)

    def _end(self, position: int) -> int:
        is_whole = self._object is None or self._object.status is Status.COMPLETE
        self.status = Status.COMPLETE if is_whole else Status.BROKEN
        return position + is_whole

    def _read_escape(self, text: str, position: int, out: list[str]) -> int:
        escape = self._escape + text[position]
        if _ESCAPE_BEGINNING.fullmatch(escape):
            self._escape = escape
        elif not _ESCAPE.fullmatch(escape) or not self._read_object(_decoded(escape), out):
            self.status = Status.BROKEN
            return position
        else:
            self._escape = ""
        return position + 1

    def _read_object(self, text: str, out: list[str]) -> int:
        """Read the string's own text; return how much of it may stand there."""
        position = 0
        if self._object is None:
            position = len(text) - len(text.lstrip(SPACE))
            if text.startswith("{", position):
                self._object = JsonScanner()
        if self._object is not None:
            position = self._object.scan(text, position, out)
            if self._object.status is Status.COMPLETE:
                position += len(text[position:]) - len(text[position:].lstrip(SPACE))
        if position < len(text):
            self.status = Status.BROKEN
        return position


def _decoded(escape: str) -> str:
    """Return an escape's character. Half a surrogate pair stays an escape: no text holds one, a JSON string may."""
    char: str = json.loads(f'"{escape}"')
    return escape if "\ud800" <= char <= "\udfff" else char
