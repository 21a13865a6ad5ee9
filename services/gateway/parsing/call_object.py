"""A call written as a JSON object: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import json
from enum import Enum, auto

from kvern.services.gateway.parsing.calls import Calls
from kvern.services.gateway.parsing.json_scanner import SPACE, JsonScanner, Status
from kvern.services.gateway.parsing.pieces import Piece
from kvern.services.gateway.parsing.quoted_object import QuotedObject

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)


class _Expects(Enum):
    OBJECT = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()
    NOTHING = auto()


_FOLLOWING = {
    _Expects.OBJECT: {"{": _Expects.FIRST_KEY},
    _Expects.FIRST_KEY: {"}": _Expects.NOTHING},
    _Expects.KEY: {},
    _Expects.COLON: {":": _Expects.VALUE},
    _Expects.NEXT: {",": _Expects.KEY, "}": _Expects.NOTHING},
}


class CallObject:
    """Reads one call, as soon as it can: arguments are given out while they come, if the name came before them.

    Arguments may be an object, a string that holds one, or none: missing, null or "". Other keys than a call's are
    passed over once the call has begun. Before that they make it no call, so that an answer that is any other JSON is
    not held back. The last brace may be missing, as it often is.
    """

    def __init__(self, calls: Calls, held: str) -> None:
        self.status = Status.OPEN
        self.held = held
        self._calls = calls
        self._expects = _Expects.OBJECT
        self._name: str | None = None
        self._has_begun = False
        self._arguments: list[str] = []
        """Read and not given out."""
        self._key = ""
        self._keys: set[str] = set()
        self._value: JsonScanner | QuotedObject | None = None
        self._value_text: list[str] = []
        """Of keys, and of values that are no arguments."""
        self._value_is_arguments = False

    def read(self, text: str, position: int, out: list[Piece]) -> int:
        """Read on from `position`; return where the object ends or breaks, or the text's end."""
        while position < len(text) and self.status is Status.OPEN:
            end = self._read_structure(text, position) if self._value is None else self._read_value(text, position)
            self.held += text[position:end]
            position = end
            if self._arguments and self._name is not None:
                self._give_arguments(self._name, out)
        return position

    def cut_off(self) -> str:
        """Return what is content: nothing after a call's beginning."""
        return "" if self._has_begun else self.held

    def _give_arguments(self, name: str, out: list[Piece]) -> None:
        if not self._has_begun:
            self._calls.begin(name, out)
            self._has_begun = True
        self._calls.add_arguments("".join(self._arguments), out)
        self._arguments.clear()
        self.held = ""

    def _read_structure(self, text: str, position: int) -> int:
        char = text[position]
        if char in SPACE:
            return position + 1
        if self._expects is _Expects.VALUE:
            self._begin_value(char)
            return position
        if char == '"' and self._expects in (_Expects.KEY, _Expects.FIRST_KEY):
            self._value = JsonScanner()
            return position
        following = _FOLLOWING[self._expects].get(char)
        if following is None or (following is _Expects.NOTHING and self._name is None):
            lacks_brace_only = self._has_begun and not self.held.strip()
            self.status = Status.COMPLETE if lacks_brace_only else Status.BROKEN
            return position
        self._expects = following
        if following is _Expects.NOTHING:
            self._end_object()
        return position + 1

    def _end_object(self) -> None:
        self.status = Status.COMPLETE
        if not self._has_begun:
            self._arguments.append("{}")

    def _begin_value(self, char: str) -> None:
        is_arguments = self._key in _ARGUMENTS
        if (self._key == "name" and char != '"') or (is_arguments and char not in '{"n'):
            self.status = Status.BROKEN
            return
        self._value_is_arguments = is_arguments and char in '{"'
        self._value = QuotedObject() if is_arguments and char == '"' else JsonScanner()

    def _read_value(self, text: str, position: int) -> int:
        value = self._value
        assert value is not None
        end = value.scan(text, position, self._arguments if self._value_is_arguments else self._value_text)
        if value.status is Status.BROKEN:
            self.status = Status.BROKEN
        elif value.status is Status.COMPLETE:
            self._end_value()
        return end

    def _end_value(self) -> None:
        value, self._value = "".join(self._value_text), None
        self._value_text.clear()
        self._value_is_arguments = False
        if self._expects is not _Expects.VALUE:
            self._end_key(json.loads(value))
            return
        self._expects = _Expects.NEXT
        if self._key == "name":
            self._end_name(json.loads(value))

    def _end_key(self, key: str) -> None:
        self._expects = _Expects.COLON
        self._key = "arguments" if key in _ARGUMENTS else key
        if self._key in self._keys or not (self._has_begun or self._key in _KEYS):
            self.status = Status.BROKEN
        self._keys.add(self._key)

    def _end_name(self, name: str) -> None:
        if name in self._calls.tools:
            self._name = name
        else:
            self.status = Status.BROKEN
