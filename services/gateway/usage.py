"""What a request took."""

from __future__ import annotations

from kvern.services.gateway.answers import CompletionTokensDetails, PromptTokensDetails, Usage
from kvern.v1.inference_pb2 import Finished, Scheduled, Started


class Tally:
    """Tokens of one request, which may have several prompts with several choices each."""

    def __init__(self) -> None:
        self.reasoning_tokens = 0
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self._completion_tokens: dict[tuple[int, int], int] = {}
        """By prompt and choice."""

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompt_tokens.values())

    @property
    def completion_tokens(self) -> int:
        return sum(self._completion_tokens.values())

    def start(self, started: Started, prompt: int = 0) -> None:
        self._prompt_tokens[prompt] = started.prompt_tokens

    def schedule(self, scheduled: Scheduled, prompt: int = 0) -> None:
        self._cached_tokens[prompt] = scheduled.cached_tokens

    def add(self, choice: int, num_tokens: int, prompt: int = 0) -> None:
        """Count tokens as they come, where that is told."""
        self._completion_tokens[prompt, choice] = self._completion_tokens.get((prompt, choice), 0) + num_tokens

    def finish(self, finished: Finished, prompt: int = 0) -> None:
        """Take a choice's own count in place of what came of it."""
        self._prompt_tokens[prompt] = finished.usage.prompt_tokens
        self._cached_tokens[prompt] = finished.usage.cached_tokens
        self._completion_tokens[prompt, finished.index] = finished.usage.completion_tokens

    def to_answer(self) -> Usage:
        prompt_tokens, completion_tokens = self.prompt_tokens, self.completion_tokens
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached_tokens.values())),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=self.reasoning_tokens),
        )
