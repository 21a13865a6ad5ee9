"""The one stream to the engine: commands go in, and what each step brings is handed to the requests it concerns."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import structlog

from kvern.services.runtime.channel import open_channel, streaming
from kvern.services.runtime.errors import ServiceError, Unavailable
from kvern.v1 import engine_pb2, engine_pb2_grpc, replica_pb2

MIN_RECONNECT_DELAY_S = 0.05
MAX_RECONNECT_DELAY_S = 2.0
"""Between a broken stream and the next try: doubles until the engine has said Hello."""

MAX_UNSENT_COMMANDS = 4096
"""With more than this waiting, the engine does not read: no request is taken. Aborts always are, one a request."""

_log = structlog.get_logger("kvern.engine_client")

_Commands = asyncio.Queue[engine_pb2.ConnectRequest]


@dataclass(slots=True)
class News:
    """What the engine said of one request since it was last asked. Times are of time.monotonic()."""

    cached_tokens: int | None = None
    """Set once, when the request was first scheduled."""
    scheduled_at: float = 0.0
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    """New tokens by choice."""
    tokens_at: dict[int, float] = field(default_factory=dict)
    """When the first of them came, by choice."""
    ended: dict[int, engine_pb2.ChoiceEnd] = field(default_factory=dict)


class EngineRequest:
    """One request in the engine. News gathers until it is taken."""

    def __init__(self, request_id: int, num_choices: int, send: Callable[[engine_pb2.ConnectRequest], None]) -> None:
        self.id = request_id
        self._send = send
        self._num_running = num_choices
        self._news = News()
        self._error: ServiceError | None = None
        self._wake = asyncio.Event()

    @property
    def is_running(self) -> bool:
        """Whether the engine has not ended all of its choices."""
        return self._num_running > 0

    async def next_news(self) -> News:
        """Wait until there is news and return it all. Raises Unavailable once the engine is lost."""
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            raise self._error
        news, self._news = self._news, News()
        return news

    def abort_choice(self, index: int) -> None:
        """Have the engine drop one choice that it has not ended. It says nothing more of it."""
        self._num_running -= 1
        self._send(engine_pb2.ConnectRequest(abort=engine_pb2.AbortRequest(id=self.id, choice=index)))

    def add_tokens(self, choice: int, token_ids: list[int], now: float) -> None:
        known = self._news.token_ids.get(choice)
        if known is None:
            self._news.token_ids[choice] = token_ids
            self._news.tokens_at[choice] = now
        else:
            known.extend(token_ids)
        self._wake.set()

    def set_scheduled(self, cached_tokens: int, now: float) -> None:
        self._news.cached_tokens = cached_tokens
        self._news.scheduled_at = now
        self._wake.set()

    def end_choice(self, end: engine_pb2.ChoiceEnd) -> None:
        self._num_running = 0 if end.HasField("refusal") else self._num_running - 1
        self._news.ended[end.index] = end
        self._wake.set()

    def fail(self, error: ServiceError) -> None:
        self._error = error
        self._wake.set()


class EngineClient:
    """Keeps the stream open for as long as `run` runs."""

    def __init__(self, address: str, on_change: Callable[[bool], None]) -> None:
        self.info: replica_pb2.EngineInfo | None = None
        """What the engine said of itself; None while there is no stream."""
        self.load = replica_pb2.ReplicaLoad()
        """As of the engine's last step."""
        self._address = address
        self._on_change = on_change
        self._ids = itertools.count(1)
        self._requests: dict[int, EngineRequest] = {}
        self._commands: _Commands | None = None

    async def run(self) -> None:
        """Connect, and again whenever the stream breaks. Calls `on_change` with whether there is an engine."""
        delay_s = MIN_RECONNECT_DELAY_S
        async with open_channel(self._address) as channel:
            stub: engine_pb2_grpc.EngineServiceAsyncStub = engine_pb2_grpc.EngineServiceStub(channel)
            while True:
                reason = await self._serve_stream(stub)
                delay_s = min(2 * delay_s, MAX_RECONNECT_DELAY_S) if self.info is None else MIN_RECONNECT_DELAY_S
                self._lose(reason)
                await asyncio.sleep(delay_s)

    def submit(self, add: engine_pb2.AddRequest, num_choices: int = 1) -> EngineRequest:
        """Send a request to the engine; its id is set here. Raises Unavailable while there is no engine to read it."""
        if self._commands is None or self._commands.qsize() >= MAX_UNSENT_COMMANDS:
            raise Unavailable("the engine is away")
        request = EngineRequest(next(self._ids), num_choices, self._commands.put_nowait)
        add.id = request.id
        self._requests[request.id] = request
        self._commands.put_nowait(engine_pb2.ConnectRequest(add=add))
        return request

    def release(self, request: EngineRequest) -> None:
        """Forget a request, and have the engine abort what of it still runs."""
        if self._requests.pop(request.id, None) is not None and self._commands is not None:
            self._commands.put_nowait(engine_pb2.ConnectRequest(abort=engine_pb2.AbortRequest(id=request.id)))

    async def _serve_stream(self, stub: engine_pb2_grpc.EngineServiceAsyncStub) -> str:
        """Run one stream to its end and return why it ended."""
        commands: _Commands = asyncio.Queue()
        try:
            async with streaming(stub.Connect(_each(commands), wait_for_ready=True)) as call:
                async for response in call:
                    if response.HasField("step"):
                        self._distribute(response.step)
                    elif response.HasField("hello"):
                        self._begin(response.hello.info, commands)
        except grpc.aio.AioRpcError as error:
            _log.warning("the stream to the engine broke", details=error.details())
            return "the engine is gone"
        return "the engine ended the stream"

    def _begin(self, info: replica_pb2.EngineInfo, commands: _Commands) -> None:
        _log.info("engine connected", model=info.model, epoch=info.epoch, contract=info.contract)
        self.info, self._commands = info, commands
        self._on_change(True)

    def _lose(self, reason: str) -> None:
        _log.warning("no engine", reason=reason, num_requests=len(self._requests))
        self.info = self._commands = None
        self.load = replica_pb2.ReplicaLoad()
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.fail(Unavailable(reason))
        self._on_change(False)

    def _distribute(self, step: engine_pb2.StepOutput) -> None:
        now = time.monotonic()
        for item in step.scheduled:
            if (request := self._requests.get(item.id)) is not None:
                request.set_scheduled(item.cached_tokens, now)
        self._distribute_tokens(step, now)
        for end in step.ended:
            if (request := self._requests.get(end.id)) is not None:
                request.end_choice(end)
                if not request.is_running:
                    del self._requests[end.id]
        if step.HasField("load"):
            self.load = step.load

    def _distribute_tokens(self, step: engine_pb2.StepOutput, now: float) -> None:
        # The column becomes a list once: slicing a repeated field for each entry would cost more than all the rest.
        token_ids = list(step.token_ids)
        choices = step.choices or itertools.repeat(0)
        counts = step.num_tokens or itertools.repeat(1)
        position = 0
        for request_id, choice, count in zip(step.ids, choices, counts, strict=False):
            request = self._requests.get(request_id)
            if request is not None:
                request.add_tokens(choice, token_ids[position : position + count], now)
            position += count


async def _each(commands: _Commands) -> AsyncIterator[engine_pb2.ConnectRequest]:
    while True:
        yield await commands.get()
