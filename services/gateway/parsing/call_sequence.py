"""Calls written as JSON objects one after another, or as a JSON array of them."""

from __future__ import annotations

from enum import Enum, auto

from kvern.services.gateway.parsing.call_object import CallObject
from kvern.services.gateway.parsing.calls import Calls
from kvern.services.gateway.parsing.json_scanner import SPACE, Status
from kvern.services.gateway.parsing.pieces import Piece


class _Expects(Enum):
    OBJECT_OR_ARRAY = auto()
    OBJECT = auto()
    NEXT_IN_ARRAY = auto()
    NEXT = auto()
    NEXT_AFTER_SEMICOLON = auto()
    NOTHING = auto()


_FOLLOWING = {
    _Expects.OBJECT_OR_ARRAY: {"[": _Expects.OBJECT},
    _Expects.OBJECT: {},
    _Expects.NEXT_IN_ARRAY: {",": _Expects.OBJECT, "]": _Expects.NOTHING},
    _Expects.NEXT: {";": _Expects.NEXT_AFTER_SEMICOLON},
    _Expects.NEXT_AFTER_SEMICOLON: {},
}


class CallSequence:
    """Reads calls until something else comes. Outside an array, whitespace or one semicolon may part them."""

    def __init__(self, calls: Calls, held: str) -> None:
        self.status = Status.OPEN
        self.held = held
        self._calls = calls
        self._expects = _Expects.OBJECT_OR_ARRAY
        self._is_array = False
        self._object: CallObject | None = None
        self._has_call = False

    def read(self, text: str, position: int, out: list[Piece]) -> int:
        """Read on from `position`; return where the calls end or break, or the text's end."""
        while position < len(text) and self.status is Status.OPEN:
            if self._object is None:
                position = self._read_separator(text, position)
            else:
                position = self._read_object(self._object, text, position, out)
        return position

    def cut_off(self) -> str:
        """Return what is content: not what only parts calls."""
        if self._object is not None:
            return self._object.cut_off()
        return "" if self._has_call else self.held

    def _read_object(self, call: CallObject, text: str, position: int, out: list[Piece]) -> int:
        position = call.read(text, position, out)
        self.held = call.held
        if call.status is Status.BROKEN:
            self.status = Status.BROKEN
        elif call.status is Status.COMPLETE:
            self._object, self._has_call, self.held = None, True, ""
            self._expects = _Expects.NEXT_IN_ARRAY if self._is_array else _Expects.NEXT
        return position

    def _read_separator(self, text: str, position: int) -> int:
        char = text[position]
        if char == "{" and self._expects is not _Expects.NEXT_IN_ARRAY:
            self._object = CallObject(self._calls, self.held)
            return position
        following = self._expects if char in SPACE else _FOLLOWING[self._expects].get(char)
        if following is None:
            self.status = Status.COMPLETE if self._expects is _Expects.NEXT else Status.BROKEN
            return position
        self._is_array |= char == "["
        self._expects = following
        self.held = self.held + char
        if following is _Expects.NOTHING:
            self.status = Status.COMPLETE
        return position + 1
