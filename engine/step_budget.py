"""How a step's tokens are shared out among requests."""

from __future__ import annotations

MIN_CHUNK_TOKENS = 16
"""Prefill tokens that a step takes even where the step-time target allows none: or a prompt would never start."""


class StepBudget:
    """What is left of a step's tokens."""

    def __init__(self, tokens: int, prefill_tokens: int) -> None:
        self.tokens = tokens
        self._prefill_tokens = prefill_tokens
        """Of these, for entries of more than one token. More is never spent on prompts."""

    @property
    def has_prefill(self) -> bool:
        return self.tokens > 0 and self._prefill_tokens > 0

    def take(self, wanted: int, num_behind: int = 0, *, must_share: bool = False) -> int:
        """Take as many of the wanted tokens as fit, and return their number.

        num_behind: running requests after this one, each of which is left a token.
        must_share: shorter prompts want a part too; one too long for one step then takes at most half of it.
        """
        num_tokens = self._share(wanted, num_behind, must_share)
        self.tokens -= num_tokens
        if num_tokens > 1:
            self._prefill_tokens -= num_tokens
        return num_tokens

    def _share(self, wanted: int, num_behind: int, must_share: bool) -> int:
        if wanted <= 1:
            return min(wanted, self.tokens)
        if not self.has_prefill:
            return 0
        most = max(1, min(self.tokens - num_behind, self._prefill_tokens))
        if must_share and wanted > most:
            most = max(most // 2, min(most, MIN_CHUNK_TOKENS))
        return min(wanted, most)
