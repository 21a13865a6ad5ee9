"""Special tokens in stop strings: they end a choice although their text is not shown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvern.services.runtime.text import Tokenizer

_FIRST_MARK = 0xD800
"""Half a surrogate pair: no text has one."""


class Marks:
    """A character for each special token that some stop string names. It stands for the token in what is searched."""

    def __init__(self) -> None:
        self._char_of_id: dict[int, str] = {}
        self.patterns: list[tuple[str, str]] = []
        """Stop strings with marks in place of special tokens, each with the stop string as it was given."""

    def get(self, token_id: int) -> str:
        """Return a token's mark, empty if it has none."""
        return self._char_of_id.get(token_id, "")

    def add(self, token_id: int) -> str:
        """Return a token's mark, which it now has."""
        return self._char_of_id.setdefault(token_id, chr(_FIRST_MARK + len(self._char_of_id)))

    def remove_from(self, text: str) -> str:
        """Return the text that is shown."""
        for char in self._char_of_id.values():
            text = text.replace(char, "")
        return text


class SpecialTokens:
    """The special tokens of one tokenizer, by their text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = ((id, tokenizer.backend.id_to_token(id)) for id in tokenizer.special_ids)
        self._id_of = {text: id for id, text in tokens if text is not None}
        # Of two that begin alike, the longer is the one that is written.
        texts = sorted(self._id_of, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, texts))) if texts else None

    def mark(self, stop_strings: Sequence[str]) -> Marks:
        """Return marks of the special tokens in stop strings."""
        marks = Marks()
        if self._any is not None:
            for stop in stop_strings:
                marked = self._any.sub(lambda match: marks.add(self._id_of[match[0]]), stop)
                if marked != stop:
                    marks.patterns.append((marked, stop))
        return marks
