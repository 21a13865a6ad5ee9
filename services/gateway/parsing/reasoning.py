"""Reasoning as DeepSeek R1, QwQ, Qwen 3 and their kin write it: <think>...</think>."""

from __future__ import annotations

from kvern.services.gateway.parsing.markers import Lead, MarkerSearch
from kvern.services.gateway.parsing.pieces import Piece, Reasoning

OPENING = "<think>"
CLOSING = "</think>"


class ReasoningMode:
    """Part of an answer that is reasoning, to the closing marker or the answer's end. Nothing else ends it."""

    def __init__(self, *, is_opened: bool) -> None:
        """`is_opened`: whether the opening marker was read; if not, it may yet come first."""
        self._before: Lead | None = Lead() if is_opened else Lead(OPENING)
        self._search = MarkerSearch((CLOSING,))

    @property
    def lead(self) -> Lead:
        """What to pass over after this part."""
        return Lead()

    def push(self, text: str, out: list[Piece]) -> str | None:
        """Return None as long as this part goes on, then the text after it."""
        if self._before is not None:
            text = self._before.push(text)
            if not text:
                return None
            self._before = None
        shown, found = self._search.push(text)
        if shown:
            out.append(Reasoning(shown))
        return None if found is None else found.rest

    def finish(self, out: list[Piece]) -> None:
        """Take it that no text follows."""
        text = self._search.held if self._before is None else self._before.held
        if text:
            out.append(Reasoning(text))
