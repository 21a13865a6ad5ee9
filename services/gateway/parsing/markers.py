"""Markers found in text as it comes, and text held back only while it may become one."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|end_of_text|>",
    "<|end|>",
    "</s>",
    "<eos>",
    "<end_of_turn>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
"""What ends a turn, of Qwen, Llama, Granite, Phi, Mistral, Gemma and DeepSeek."""

MAX_SPACE = 8
"""Characters of whitespace before a marker that are taken to be the template's."""


class Beginnings:
    """The strings that a text may end with while one of several markers is on its way."""

    def __init__(self, markers: Collection[str], *, with_whole: bool = False) -> None:
        lengths = {marker: len(marker) + with_whole for marker in markers}
        self._beginnings = {marker[:end] for marker, length in lengths.items() for end in range(1, length)}
        self._longest = max((len(beginning) for beginning in self._beginnings), default=0)
        self._first = re.compile("|".join(sorted(re.escape(marker[0]) for marker in markers)))

    def position(self, text: str) -> int:
        """Return where the longest such string begins that `text` ends with: its length if there is none."""
        for match in self._first.finditer(text, max(0, len(text) - self._longest)):
            if text[match.start() :] in self._beginnings:
                return match.start()
        return len(text)


@dataclass(frozen=True, slots=True)
class Found:
    """A marker, the whitespace right before it, and the text after it."""

    marker: str
    space: str
    rest: str


class MarkerSearch:
    """Looks for the first of several markers. Of those that begin on one character, the longest.

    Held back is what may yet become a marker, and at most MAX_SPACE characters of whitespace before it.
    """

    def __init__(self, markers: tuple[str, ...]) -> None:
        self._pattern, self._beginnings = _compiled(markers)
        self.held = ""

    def push(self, text: str) -> tuple[str, Found | None]:
        """Return the text that is none, and the marker it ends at. A new search must read what follows a marker."""
        text = self.held + text
        match = self._pattern.search(text)
        start = self._beginnings.position(text) if match is None else match.start()
        shown = _before_space(text, start)
        if match is None:
            self.held = text[shown:]
            return text[:shown], None
        self.held = ""
        return text[:shown], Found(match.group(), text[shown:start], text[match.end() :])


@lru_cache(maxsize=64)
def _compiled(markers: tuple[str, ...]) -> tuple[re.Pattern[str], Beginnings]:
    longest_first = sorted(markers, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))), Beginnings(markers)


def _before_space(text: str, end: int) -> int:
    start = max(0, end - MAX_SPACE)
    return start + len(text[start:end].rstrip())


class Lead:
    """Passes over whitespace, one marker if it is what comes first, and the whitespace after it."""

    def __init__(self, marker: str = "") -> None:
        self._marker = marker
        self.held = ""

    def push(self, text: str) -> str:
        """Return the text after the lead, nothing as long as it may go on."""
        text = (self.held + text).lstrip()
        if self._marker and text.startswith(self._marker):
            text = text.removeprefix(self._marker).lstrip()
            self._marker = ""
        if self._marker.startswith(text):
            self.held = text
            return ""
        self.held = ""
        return text


class EndTokenFilter:
    """Takes away the control token that ends an answer. One in mid-text is text."""

    _beginnings = Beginnings(END_TOKENS, with_whole=True)

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """Return what may be shown now."""
        text = self._held + text
        shown = self._beginnings.position(text)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """Return what was held back, now that no text follows, unless it is a token."""
        return "" if self._held in END_TOKENS else self._held
