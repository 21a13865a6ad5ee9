"""One choice of a request: its tokens become text, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvern.services.detokenizer.incremental_decode import IncrementalDecoder
from kvern.services.detokenizer.stop_strings import StopStringMatcher


@dataclass(slots=True)
class Choice:
    """State of one choice. Tokens after a matched stop string do not count."""

    index: int
    decoder: IncrementalDecoder
    matcher: StopStringMatcher
    min_tokens: int = 0
    """No stop string that is complete before the choice has this many tokens ends it."""
    lead: str = ""
    """Text to be shown before any other: an echoed prompt, or what a broken stream did not tell of its tokens."""
    num_tokens: int = 0
    text_bytes: int = 0
    """Bytes of text sent, in UTF-8."""
    unsent_ids: list[int] = field(default_factory=list)
    """Tokens that no frame has told of yet."""
    begins_text: bool = True
    """Whether the next token is the first that is shown."""
    first_token_at: float | None = None
    """Of time.monotonic()."""
    is_finished: bool = False

    @property
    def matched_stop(self) -> str | None:
        return self.matcher.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens and return the text that can be shown."""
        if not self.matcher.is_searching:
            self._count(token_ids)
            return self.decoder.push(token_ids)
        text = ""
        for token_id in token_ids:
            if self.matched_stop is not None:
                break
            self._count([token_id])
            text += self._match(self.decoder.push([token_id]) + self.matcher.marks.get(token_id))
        return text

    def push_hidden(self, token_id: int) -> str:
        """Take a token that counts and is not turned into text. Return the text that can be shown."""
        if self.matched_stop is not None:
            return ""
        self._count([token_id])
        return self._match(self.matcher.marks.get(token_id))

    def finish(self) -> str:
        """Return the text that was held back, now that no token follows."""
        if self.matched_stop is not None:
            return ""
        text = self.matcher.push(self.decoder.finish())
        return text if self.matched_stop is not None else text + self.matcher.finish()

    def take_lead(self) -> str:
        lead, self.lead = self.lead, ""
        return lead

    def _match(self, text: str) -> str:
        return self.matcher.pass_over(text) if self.num_tokens < self.min_tokens else self.matcher.push(text)

    def _count(self, token_ids: Sequence[int]) -> None:
        self.num_tokens += len(token_ids)
        self.unsent_ids.extend(token_ids)
