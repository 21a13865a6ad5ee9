"""JSON checked character by character as it comes. Source: RFC 8259."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto

MAX_DEPTH = 64
"""Objects and arrays that may be open at once."""

SPACE = " \t\n\r"

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}

_DIGITS = "0123456789"
_NUMBERS: dict[str, dict[str, str]] = {
    "start": {"-": "sign", "0": "zero"} | dict.fromkeys("123456789", "integer"),
    "sign": {"0": "zero"} | dict.fromkeys("123456789", "integer"),
    "zero": {".": "point", "e": "e", "E": "e"},
    "integer": {".": "point", "e": "e", "E": "e"} | dict.fromkeys(_DIGITS, "integer"),
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {"e": "e", "E": "e"} | dict.fromkeys(_DIGITS, "fraction"),
    "e": {"+": "exponent sign", "-": "exponent sign"} | dict.fromkeys(_DIGITS, "exponent"),
    "exponent sign": dict.fromkeys(_DIGITS, "exponent"),
    "exponent": dict.fromkeys(_DIGITS, "exponent"),
}
_WHOLE_NUMBERS = {"zero", "integer", "fraction", "exponent"}


class Status(Enum):
    """How far what is read has come."""

    OPEN = auto()
    COMPLETE = auto()
    BROKEN = auto()


class JsonScanner:
    """Reads one JSON value. Never looks at a character twice, whatever the pieces it comes in."""

    def __init__(self) -> None:
        self.status = Status.OPEN
        self._step: Callable[[JsonScanner, str, int], int] = JsonScanner._value
        self._closers: list[str] = []
        self._is_key = False
        self._remaining = ""
        """What is missing of a literal, or the hex digits missing of an escape."""
        self._number = "start"

    def scan(self, text: str, position: int, out: list[str]) -> int:
        """Read on from `position`; append what was read to `out`; return where the value ends, breaks or is cut off.

        What is appended is the text itself, but for control characters in strings: JSON wants them escaped, models
        write them plain.
        """
        while position < len(text) and self.status is Status.OPEN:
            step = self._step
            end = step(self, text, position)
            if end > position:
                piece = text[position:end]
                is_control = step is JsonScanner._string and piece < " "
                out.append(json.dumps(piece)[1:-1] if is_control else piece)
            position = end
        return position

    def _break(self, position: int) -> int:
        self.status = Status.BROKEN
        return position

    def _value(self, text: str, position: int) -> int:
        char = text[position]
        if char in SPACE:
            return position + 1
        if char == '"':
            self._is_key, self._step = False, JsonScanner._string
        elif char == "{":
            return self._open("}", JsonScanner._first_key, position)
        elif char == "[":
            return self._open("]", JsonScanner._first_item, position)
        elif char in _LITERALS:
            self._remaining, self._step = _LITERALS[char], JsonScanner._literal
        elif char in _NUMBERS["start"]:
            self._number, self._step = _NUMBERS["start"][char], JsonScanner._digits
        else:
            return self._break(position)
        return position + 1

    def _open(self, closer: str, step: Callable[[JsonScanner, str, int], int], position: int) -> int:
        if len(self._closers) == MAX_DEPTH:
            return self._break(position)
        self._closers.append(closer)
        self._step = step
        return position + 1

    def _first_item(self, text: str, position: int) -> int:
        return self._close(position) if text[position] == "]" else self._item(text, position)

    def _item(self, text: str, position: int) -> int:
        if text[position] not in SPACE:
            self._step = JsonScanner._value
        return self._value(text, position)

    def _first_key(self, text: str, position: int) -> int:
        return self._close(position) if text[position] == "}" else self._key(text, position)

    def _key(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"':
            self._is_key, self._step = True, JsonScanner._string
        elif char not in SPACE:
            return self._break(position)
        return position + 1

    def _colon(self, text: str, position: int) -> int:
        char = text[position]
        if char == ":":
            self._step = JsonScanner._value
        elif char not in SPACE:
            return self._break(position)
        return position + 1

    def _next(self, text: str, position: int) -> int:
        char, closer = text[position], self._closers[-1]
        if char == closer:
            return self._close(position)
        if char == ",":
            self._step = JsonScanner._key if closer == "}" else JsonScanner._value
        elif char not in SPACE:
            return self._break(position)
        return position + 1

    def _close(self, position: int) -> int:
        self._closers.pop()
        self._end_value()
        return position + 1

    def _end_value(self) -> None:
        self._step = JsonScanner._next
        if not self._closers:
            self.status = Status.COMPLETE

    def _string(self, text: str, position: int) -> int:
        plain = _PLAIN.match(text, position)
        if plain is not None:
            return plain.end()
        char = text[position]
        if char == "\\":
            self._step = JsonScanner._escape
        elif char == '"' and self._is_key:
            self._step = JsonScanner._colon
        elif char == '"':
            self._end_value()
        return position + 1

    def _escape(self, text: str, position: int) -> int:
        char = text[position]
        if char == "u":
            self._remaining, self._step = "xxxx", JsonScanner._hex
        elif char in '"\\/bfnrt':
            self._step = JsonScanner._string
        else:
            return self._break(position)
        return position + 1

    def _hex(self, text: str, position: int) -> int:
        if text[position] not in "0123456789abcdefABCDEF":
            return self._break(position)
        self._remaining = self._remaining[1:]
        if not self._remaining:
            self._step = JsonScanner._string
        return position + 1

    def _literal(self, text: str, position: int) -> int:
        if text[position] != self._remaining[0]:
            return self._break(position)
        self._remaining = self._remaining[1:]
        if not self._remaining:
            self._end_value()
        return position + 1

    def _digits(self, text: str, position: int) -> int:
        following = _NUMBERS[self._number].get(text[position])
        if following is not None:
            self._number = following
            return position + 1
        if self._number not in _WHOLE_NUMBERS:
            return self._break(position)
        self._end_value()
        return position
