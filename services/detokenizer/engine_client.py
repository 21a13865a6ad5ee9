"""The one stream to the engine: commands go in, and what each step brings is handed to the requests it concerns."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

import grpc
import structlog
from google.protobuf.message import Message

from kvern.services.detokenizer.engine_request import EngineRequest
from kvern.services.detokenizer.prefill_speed import PrefillSpeed
from kvern.services.detokenizer.turns import Turns
from kvern.services.runtime.channel import open_channel, streaming
from kvern.services.runtime.errors import Unavailable
from kvern.services.runtime.slow_reader import ReaderWatch
from kvern.services.runtime.tls import ClientTls
from kvern.v1 import engine_pb2, engine_pb2_grpc, replica_pb2

MIN_RECONNECT_DELAY_S = 0.05
MAX_RECONNECT_DELAY_S = 2.0
"""Between a broken stream and the next try: doubles until the engine has said Hello."""

MAX_UNSENT_COMMANDS = 4096
"""With more than this waiting, the engine does not read: no request is taken. What concerns requests it has always is,
a few commands each."""

_log = structlog.get_logger("kvern.engine_client")

_Message = TypeVar("_Message", bound=Message)

_Commands = asyncio.Queue[engine_pb2.ConnectRequest]


class EngineClient:
    """Keeps the stream open for as long as `run` runs."""

    def __init__(
        self,
        address: str,
        on_change: Callable[[bool], None],
        on_park: Callable[[], None],
        tls: ClientTls | None = None,
    ) -> None:
        self.info: replica_pb2.EngineInfo | None = None
        """What the engine said of itself; None while there is no stream."""
        self.load = replica_pb2.ReplicaLoad()
        """As of the engine's last step."""
        self.tells_blocks = False
        """Whether the engine tells which blocks it has cached."""
        self.prefill_speed = PrefillSpeed()
        self._address = address
        self._tls = tls
        self._on_change = on_change
        self._on_park = on_park
        self._ids = itertools.count(1)
        self._requests: dict[int, EngineRequest] = {}
        self._commands: _Commands | None = None
        self._stub: engine_pb2_grpc.EngineServiceAsyncStub | None = None
        self._turns = Turns()

    @property
    def num_parked(self) -> int:
        # Copied at once: metrics are read in another thread.
        return sum(request.is_parked for request in list(self._requests.values()))

    @property
    def predicted_wait_s(self) -> float:
        """How long a request that comes now will wait for its turn, in seconds; 0 if too little is known."""
        return self.prefill_speed.wait_s(self.load.queued_prefill_tokens, time.monotonic())

    async def run(self) -> None:
        """Connect, and again whenever the stream breaks. Calls `on_change` with whether an engine is there and runs."""
        delay_s = MIN_RECONNECT_DELAY_S
        async with open_channel(self._address, tls=self._tls) as channel:
            self._stub = stub = engine_pb2_grpc.EngineServiceStub(channel)
            while True:
                reason = await self._serve_stream(stub)
                delay_s = min(2 * delay_s, MAX_RECONNECT_DELAY_S) if self.info is None else MIN_RECONNECT_DELAY_S
                self._lose(reason)
                await asyncio.sleep(delay_s)

    def submit(self, add: engine_pb2.AddRequest, choices: Iterable[int], reader: ReaderWatch) -> EngineRequest:
        """Have the engine generate some choices of a request; its id is set here.

        Raises Unavailable while there is no engine to read it.
        """
        if self._commands is None or self._commands.qsize() >= MAX_UNSENT_COMMANDS:
            raise Unavailable("the engine is away")
        send = self._commands.put_nowait
        request = EngineRequest(next(self._ids), choices, send, reader, self._turns, self._on_park)
        request.num_tokens_ahead = self.load.queued_prefill_tokens
        add.id = request.id
        self._requests[request.id] = request
        self._commands.put_nowait(engine_pb2.ConnectRequest(add=add))
        return request

    def release(self, request: EngineRequest) -> None:
        """Forget a request, and have the engine abort what of it still runs."""
        if self._requests.pop(request.id, None) is not None and self._commands is not None:
            self._commands.put_nowait(engine_pb2.ConnectRequest(abort=engine_pb2.AbortRequest(id=request.id)))

    def drop_cache(self) -> None:
        """Have the engine forget all cached blocks before it takes the next request. Raises Unavailable without one."""
        if self._commands is None:
            raise Unavailable("the engine is away")
        self._commands.put_nowait(engine_pb2.ConnectRequest(drop_cache=replica_pb2.DropCacheRequest()))

    def watch_blocks(
        self, start: int, salt: str
    ) -> grpc.aio.UnaryStreamCall[engine_pb2.WatchBlocksRequest, engine_pb2.WatchBlocksResponse]:
        """Have the engine tell which blocks of a salt it has cached, on a stream of its own. Raises Unavailable."""
        if self._stub is None:
            raise Unavailable("the engine is away")
        return self._stub.WatchBlocks(engine_pb2.WatchBlocksRequest(start=start, salt=salt))

    async def _serve_stream(self, stub: engine_pb2_grpc.EngineServiceAsyncStub) -> str:
        """Run one stream to its end and return why it ended."""
        commands: _Commands = asyncio.Queue()
        try:
            async with streaming(stub.Connect(_each(commands), wait_for_ready=True)) as call:
                async for response in call:
                    if response.HasField("step"):
                        self._distribute(response.step)
                    elif response.HasField("hello"):
                        self._begin(response.hello, commands)
        except grpc.aio.AioRpcError as error:
            _log.warning("the stream to the engine broke", details=error.details())
            return "the engine is gone"
        return "the engine ended the stream"

    def _begin(self, hello: engine_pb2.Hello, commands: _Commands) -> None:
        info = hello.info
        _log.info("engine connected", model=info.model, epoch=info.epoch, contract=info.contract)
        self.info, self.tells_blocks, self._commands = info, hello.tells_blocks, commands
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
        requests = self._requests
        for item in step.scheduled:
            if (request := requests.get(item.id)) is not None:
                self.prefill_speed.observe(request.num_tokens_ahead, now - request.submitted_at, now)
                request.set_scheduled(item.cached_tokens, now)
        for told in step.prompt_logprobs:
            if (request := requests.get(told.id)) is not None:
                request.add_prompt_logprobs(_own(told))
        self._distribute_tokens(step, now)
        for end in step.ended:
            if (request := requests.get(end.id)) is not None:
                request.end_choice(end, now)
                if not request.is_running:
                    del requests[end.id]
        if step.HasField("load"):
            self._take_load(step.load)

    def _take_load(self, load: replica_pb2.ReplicaLoad) -> None:
        was_stalled, self.load = self.load.stalled, load
        if load.stalled != was_stalled:
            _log.warning("the engine is stalled" if load.stalled else "the engine goes on")
            self._on_change(not load.stalled)

    def _distribute_tokens(self, step: engine_pb2.StepOutput, now: float) -> None:
        # The column becomes a list once: slicing a repeated field for each entry would cost more than all the rest.
        token_ids = list(step.token_ids)
        logprobs_of = {item.entry: item for item in step.logprobs}
        choices = step.choices or itertools.repeat(0)
        counts = step.num_tokens or itertools.repeat(1)
        requests = self._requests
        start = 0
        for request_id, choice, count in zip(step.ids, choices, counts, strict=False):
            end = start + count
            request = requests.get(request_id)
            if request is not None:
                logprobs = logprobs_of and [_own(logprobs_of[i]) for i in range(start, end) if i in logprobs_of]
                request.add_tokens(choice, token_ids[start:end], logprobs or (), now)
            start = end


def _own(part: _Message) -> _Message:
    """Copy a part of a message that is kept: it would keep the whole message."""
    own = type(part)()
    own.CopyFrom(part)
    return own


async def _each(commands: _Commands) -> AsyncIterator[engine_pb2.ConnectRequest]:
    while True:
        yield await commands.get()
