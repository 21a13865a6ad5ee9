"""One request in the engine: what the engine says of it gathers here until its writer takes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvern.services.detokenizer.turns import Turns
from kvern.services.runtime.errors import ServiceError
from kvern.services.runtime.slow_reader import ReaderWatch
from kvern.services.runtime.tracing import current_span
from kvern.v1 import engine_pb2

MAX_BUFFERED_TOKENS = 1024
"""Of all choices of a request, while its writer is busy. With more, the request is parked in the engine. Alternatives,
and the prompt's tokens with log-probabilities, count as tokens. Steps that were under way add some."""


@dataclass(slots=True)
class ChoiceNews:
    """What is new of one choice."""

    came_at: float
    """When the first of it came, of time.monotonic()."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[engine_pb2.EngineTokenLogprobs] = field(default_factory=list)
    """Of each of the tokens, if they were asked for."""
    end: engine_pb2.ChoiceEnd | None = None


@dataclass(slots=True)
class News:
    """What the engine said of one request since it was last asked."""

    cached_tokens: int | None = None
    """Set once, when the request was first scheduled."""
    scheduled_at: float = 0.0
    """Of time.monotonic()."""
    prompt_logprobs: list[engine_pb2.EnginePromptLogprobs] = field(default_factory=list)
    choices: dict[int, ChoiceNews] = field(default_factory=dict)


class EngineRequest:
    """One request in the engine, and the buffer between engine and writer.

    While the buffer is over its bound the request is parked in the engine. `reader` is told as long as that lasts, and
    when all that is missing of the call is that what has come is read.
    """

    def __init__(
        self,
        request_id: int,
        choices: Iterable[int],
        send: Callable[[engine_pb2.ConnectRequest], None],
        reader: ReaderWatch,
        turns: Turns,
        on_park: Callable[[], None],
    ) -> None:
        self.id = request_id
        self.is_parked = False
        self.submitted_at = time.monotonic()
        self.num_tokens_ahead = 0
        """Prompt tokens that were queued in the engine when it was submitted."""
        self._send = send
        self._span = current_span()
        self._reader = reader
        self._turns = turns
        self._on_park = on_park
        self._running = set(choices)
        self._news = News()
        self._has_news = False
        self._num_buffered = 0
        self._error: ServiceError | None = None
        self._writer: asyncio.Future[None] | None = None
        """Of the writer that waits for news or for its turn; None while it is busy."""

    @property
    def is_running(self) -> bool:
        """Whether the engine has not ended all of its choices."""
        return bool(self._running)

    async def next_news(self) -> News:
        """Wait for news and for a turn to write it; return it all. Raises Unavailable once the engine is lost."""
        self._writer = asyncio.get_running_loop().create_future()
        if self._has_news:
            self._turns.line_up(self._writer)
        await self._writer
        self._writer = None
        if self._error is not None:
            raise self._error
        news, self._news, self._has_news = self._news, News(), False
        self._num_buffered = 0
        if self.is_parked and self.is_running:
            self._unpark()
        return news

    def abort_choice(self, index: int) -> None:
        """Have the engine drop one choice that it has not ended. It says nothing more of it."""
        self._send(engine_pb2.ConnectRequest(abort=engine_pb2.AbortRequest(id=self.id, choice=index)))
        self._end(index)

    def set_scheduled(self, cached_tokens: int, now: float) -> None:
        self._news.cached_tokens = cached_tokens
        self._news.scheduled_at = now
        self._tell()

    def add_tokens(
        self, choice: int, token_ids: list[int], logprobs: Sequence[engine_pb2.EngineTokenLogprobs], now: float
    ) -> None:
        """logprobs: of each of the tokens, or of none."""
        news = self._news_of(choice, now)
        news.token_ids += token_ids
        for each in logprobs:
            news.logprobs.append(each)
            self._num_buffered += len(each.top_ids)
        self._buffer(len(token_ids))

    def add_prompt_logprobs(self, told: engine_pb2.EnginePromptLogprobs) -> None:
        self._news.prompt_logprobs.append(told)
        self._buffer(sum(1 + len(item.top_ids) for item in told.items))

    def end_choice(self, end: engine_pb2.ChoiceEnd, now: float) -> None:
        self._news_of(end.index, now).end = end
        if end.HasField("refusal"):
            self._running.clear()
        self._end(end.index)
        self._tell()

    def fail(self, error: ServiceError) -> None:
        self._error = error
        self._reader.hold()
        self._tell()

    def _news_of(self, choice: int, now: float) -> ChoiceNews:
        news = self._news.choices.get(choice)
        if news is None:
            self._news.choices[choice] = news = ChoiceNews(now)
        return news

    def _buffer(self, num_tokens: int) -> None:
        self._num_buffered += num_tokens
        self._tell()
        if self._num_buffered > MAX_BUFFERED_TOKENS and self._writer is None and not self.is_parked:
            self._park()

    def _tell(self) -> None:
        if self._writer is not None and not self._has_news:
            self._turns.line_up(self._writer)
        self._has_news = True

    def _end(self, choice: int) -> None:
        # One that was aborted may have ended by itself in the meantime.
        self._running.discard(choice)
        if not self._running:
            self._reader.hold()

    def _park(self) -> None:
        self.is_parked = True
        self._on_park()
        self._span.add_event("parked")
        self._reader.hold()
        self._send(engine_pb2.ConnectRequest(park=engine_pb2.ParkRequest(id=self.id)))

    def _unpark(self) -> None:
        self.is_parked = False
        self._reader.release()
        self._send(engine_pb2.ConnectRequest(unpark=engine_pb2.UnparkRequest(id=self.id)))
