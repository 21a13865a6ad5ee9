"""Many streams at once, whose texts are known."""

from __future__ import annotations

import asyncio

from kvern.client import AsyncClient, Delta, Event, Finished
from tests.up_process import PATIENCE_S

NUM_STREAMS = 20
MAX_TOKENS = 12


def prompts(count: int) -> list[str]:
    return [f"{number} little mills stood by the river, and" for number in range(2, 2 + count)]


class Crowd:
    """Greedy streams, all at a time."""

    def __init__(self, client: AsyncClient, num_streams: int = NUM_STREAMS, max_tokens: int = MAX_TOKENS) -> None:
        self._client = client
        self._num_streams = num_streams
        self._max_tokens = max_tokens
        self.under_way = asyncio.Event()
        """Set when all together have brought a third of their tokens."""
        self.num_moves = 0
        self._num_tokens = 0

    async def run(self) -> list[str]:
        return await asyncio.gather(*map(self._text, prompts(self._num_streams)))

    async def _text(self, prompt: str) -> str:
        stream = self._client.generate(
            prompt,
            max_tokens=self._max_tokens,
            temperature=0,
            ignore_eos=True,
            token_ids=True,
            timeout_s=PATIENCE_S,
        )
        return "".join([self._take(event) async for event in stream])

    def _take(self, event: Event) -> str:
        if isinstance(event, Finished):
            assert event.usage.completion_tokens == self._max_tokens
            self.num_moves += event.timing.migrations
        if not isinstance(event, Delta):
            return ""
        self._num_tokens += len(event.token_ids)
        if self._num_tokens >= self._num_streams * self._max_tokens // 3:
            self.under_way.set()
        return event.text
