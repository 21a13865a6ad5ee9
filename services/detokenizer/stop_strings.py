"""Stop strings found in text as it comes, each character looked at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from kvern.services.detokenizer.special_tokens import Marks


class StopStringMatcher:
    """Looks for stop strings across the pieces of one text.

    The match is the one that is complete first; of those that end on one character, the longest. So it does not depend
    on where the text was cut. Held back is only what a stop string may begin with. Source: Knuth, Morris, Pratt, one
    automaton a stop string.

    A special token that is not shown, but named in a stop string, is a character of the searched text: its mark. Marks
    are never shown, with `include_stop` neither.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_stop: bool, marks: Marks | None = None) -> None:
        self.marks = Marks() if marks is None else marks
        self._patterns = [_Pattern(stop, stop) for stop in stop_strings]
        self._patterns += [_Pattern(marked, stop) for marked, stop in self.marks.patterns]
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string found. Nothing may be pushed after it."""

    @property
    def is_searching(self) -> bool:
        """Whether there are stop strings at all."""
        return bool(self._patterns)

    def push(self, text: str) -> str:
        """Return what may be shown now, up to the match if there is one; with `include_stop` the match too."""
        if not self._patterns:
            return text
        for position, char in enumerate(text, start=1):
            if self._advance(char):
                return self._cut(self._held + text[:position])
        self._held += text
        return self._release(len(self._held) - self._num_held())

    def pass_over(self, text: str) -> str:
        """Take text that no stop string may end: one that is complete in it is text. Return what may be shown now."""
        for char in text:
            if self._advance(char):
                for pattern in self._patterns:
                    pattern.pass_match()
        self._held += text
        return self._release(len(self._held) - self._num_held())

    def finish(self) -> str:
        """Return what was held back, now that no text follows."""
        return self._release(len(self._held))

    def _advance(self, char: str) -> bool:
        is_complete = False
        for pattern in self._patterns:
            is_complete |= pattern.advance(char)
        return is_complete

    def _cut(self, text: str) -> str:
        longest = max((p for p in self._patterns if p.num_matched == len(p.text)), key=lambda p: len(p.text))
        self.matched = longest.stop
        self._held = ""
        return self.marks.remove_from(text if self._include_stop else text.removesuffix(longest.text))

    def _num_held(self) -> int:
        return max(pattern.num_matched for pattern in self._patterns)

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return self.marks.remove_from(text)


class _Pattern:
    """How much of one stop string the text ends with. `text` is what is searched for, `stop` what the client gave."""

    __slots__ = ("_borders", "num_matched", "stop", "text")

    def __init__(self, text: str, stop: str) -> None:
        self.text = text
        self.stop = stop
        self.num_matched = 0
        self._borders = _borders(text)

    def advance(self, char: str) -> bool:
        """Take the text's next character; return whether the text now ends with the whole stop string."""
        while self.num_matched and self.text[self.num_matched] != char:
            self.num_matched = self._borders[self.num_matched - 1]
        if self.text[self.num_matched] == char:
            self.num_matched += 1
        return self.num_matched == len(self.text)

    def pass_match(self) -> None:
        """Go on after a whole match, if there is one, which may end with the beginning of the next."""
        if self.num_matched == len(self.text):
            self.num_matched = self._borders[-1]


@lru_cache(maxsize=256)  # the choices of a request search for the same
def _borders(text: str) -> tuple[int, ...]:
    """Return for each prefix of `text` the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for position in range(1, len(text)):
        while length and text[position] != text[length]:
            length = borders[length - 1]
        if text[position] == text[length]:
            length += 1
        borders[position] = length
    return tuple(borders)
