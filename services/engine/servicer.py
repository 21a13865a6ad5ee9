"""EngineService: many requests on one stream, one StepOutput a step."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from typing import Any, NamedTuple

import grpc
import structlog

from kvern.engine.core import Abort, Add, Output, Park, Refused, ResetCache, Unpark
from kvern.engine.errors import RequestRefused
from kvern.engine.grammar import Grammar
from kvern.engine.plan import PromptLogprobs, StepResult, TokenLogprobs
from kvern.engine.request import FinishReason
from kvern.services.engine.block_log import BlockLog
from kvern.services.engine.convert import (
    MAX_PIECE_BYTES,
    arrival_of,
    choices_of,
    to_choice_end,
    to_load,
    to_prompt_logprobs,
    to_requests,
    to_token_logprobs,
)
from kvern.services.engine.engine_thread import EngineThread
from kvern.services.engine.grammars import Grammars
from kvern.services.engine.request_spans import RequestSpans
from kvern.services.engine.request_stats import RequestStats
from kvern.services.engine.validate import check_add
from kvern.services.runtime.errors import InvalidArgument, Unsupported
from kvern.services.runtime.tracing import NO_TRACER, Tracer
from kvern.v1 import engine_pb2, engine_pb2_grpc, replica_pb2

_log = structlog.get_logger("kvern.engine")


MAX_PENDING_BYTES = 16 * 2**20
"""Of outputs that a stream has not taken. With more, the engine pauses."""

_TOKEN_BYTES = 12
"""About what one token takes in an output."""


class Stream:
    """One Connect call: its requests, and what is to be written to it. While a message is being written, what the next
    steps bring merges into one, or into several where that would be too large."""

    def __init__(self) -> None:
        self.engine_ids: dict[int, dict[int, int]] = {}
        """Stream's id to choice to engine-wide id, of choices that have not ended."""
        self._compiling: dict[int, asyncio.Task[None]] = {}
        """By stream's id: requests that have not reached the engine, for their grammar is being compiled."""
        self.ended = False
        self.error: BaseException | None = None
        self._pending: deque[engine_pb2.StepOutput] = deque()
        self._last_bytes = 0
        """About the size of the last pending output."""
        self._wake = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether so much is pending that nothing should be added."""
        return len(self._pending) > MAX_PENDING_BYTES // MAX_PIECE_BYTES

    def pending(self) -> engine_pb2.StepOutput:
        """Return the output being gathered, to be added to."""
        return self._pending[-1] if self._pending else self._begin()

    def add_token(self, stream_id: int, choice: int, token_id: int, logprobs: TokenLogprobs | None) -> None:
        item = None if logprobs is None else to_token_logprobs(logprobs)
        pending = self._with_room_for(_TOKEN_BYTES if item is None else _TOKEN_BYTES + item.ByteSize())
        if item is not None:
            item.entry = len(pending.token_ids)
            pending.logprobs.append(item)
        if choice or pending.choices:
            # The column is left out as long as it would be all zeros.
            pending.choices.extend([0] * (len(pending.ids) - len(pending.choices)))
            pending.choices.append(choice)
        pending.ids.append(stream_id)
        pending.token_ids.append(token_id)

    def add_prompt_logprobs(self, stream_id: int, told: PromptLogprobs) -> None:
        for piece in to_prompt_logprobs(told, stream_id):
            self._with_room_for(piece.ByteSize()).prompt_logprobs.append(piece)

    def refuse(self, stream_id: int, field: str, message: str) -> None:
        refusal = engine_pb2.Refusal(field=field, message=message)
        self.pending().ended.append(engine_pb2.ChoiceEnd(id=stream_id, refusal=refusal))

    def compile(self, stream_id: int, work: Coroutine[Any, Any, None]) -> None:
        """Run what compiles a request's grammar and hands it on. What it raises ends the stream."""

        def done(task: asyncio.Task[None]) -> None:
            self._compiling.pop(stream_id, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.end(error)

        self._compiling[stream_id] = task = asyncio.create_task(work)
        task.add_done_callback(done)

    def stop_compiling(self, stream_id: int) -> None:
        if (task := self._compiling.get(stream_id)) is not None:
            task.cancel()

    def end(self, error: BaseException | None = None) -> None:
        self.ended, self.error = True, error
        self._wake.set()

    async def next_output(self) -> engine_pb2.StepOutput | None:
        """Wait for something to write. None: the stream has ended. Raises what broke it."""
        await self._wake.wait()
        self._wake.clear()
        if self.error is not None:
            raise self.error
        if self.ended:
            return None
        output = self._pending.popleft()
        if self._pending:
            self._wake.set()
        return output

    def _with_room_for(self, num_bytes: int) -> engine_pb2.StepOutput:
        """Return the output being gathered, or a new one where that would become too large."""
        pending = self.pending()
        if self._last_bytes and self._last_bytes + num_bytes > MAX_PIECE_BYTES:
            pending = self._begin()
        self._last_bytes += num_bytes
        return pending

    def _begin(self) -> engine_pb2.StepOutput:
        self._pending.append(engine_pb2.StepOutput())
        self._last_bytes = 0
        self._wake.set()
        return self._pending[-1]


class Owner(NamedTuple):
    """Whom one of the engine's requests belongs to."""

    stream: Stream
    stream_id: int
    choice: int


class ServedEngine(NamedTuple):
    """A loaded engine and what it says of itself."""

    thread: EngineThread
    info: replica_pb2.EngineInfo
    grammars: Grammars


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Maps streams' requests to the engine's, and the engine's outputs back."""

    def __init__(
        self, seed: int, requests: RequestStats, tracer: Tracer = NO_TRACER, blocks: BlockLog | None = None
    ) -> None:
        """requests: told what becomes of each. blocks: for those who watch; None: nobody may."""
        self._seed = seed
        self._requests = requests
        self._blocks = blocks
        self._load = replica_pb2.ReplicaLoad()
        """As last told."""
        self._spans = RequestSpans(tracer)
        self._numbers = itertools.count(1)
        self._owners: dict[int, Owner] = {}
        self._streams: set[Stream] = set()
        self._ready: asyncio.Future[ServedEngine] = asyncio.get_running_loop().create_future()

    def start_serving(self, engine: ServedEngine) -> None:
        """Let streams begin. Those that came while the model was loading have waited."""
        self._ready.set_result(engine)

    async def Connect(
        self, request_iterator: AsyncIterator[engine_pb2.ConnectRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[engine_pb2.ConnectResponse]:
        engine = await asyncio.shield(self._ready)
        stream = Stream()
        self._streams.add(stream)
        if self._load.stalled:
            stream.pending().load.CopyFrom(self._load)
        reader = asyncio.create_task(self._read(engine, stream, request_iterator))
        try:
            hello = engine_pb2.Hello(info=engine.info, tells_blocks=self._blocks is not None)
            yield engine_pb2.ConnectResponse(hello=hello)
            while (output := await stream.next_output()) is not None:
                self._pace(engine)
                yield engine_pb2.ConnectResponse(step=output)
        finally:
            reader.cancel()
            self._streams.discard(stream)
            self._abort_all(engine, stream)
            self._pace(engine)

    async def WatchBlocks(
        self, request: engine_pb2.WatchBlocksRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[engine_pb2.WatchBlocksResponse]:
        if self._blocks is None:
            raise Unsupported("WatchBlocks", "this engine was started without --smg-kv-events")
        if request.salt != self._blocks.salt:
            raise InvalidArgument("salt", "the engine's --smg-salt is another one than the detokenizer's")
        async for message in self._blocks.watch(request.start):
            yield message

    def _pace(self, engine: ServedEngine) -> None:
        """Let the engine run as fast as its outputs are taken."""
        if any(stream.is_full for stream in self._streams):
            engine.thread.pause()
        else:
            engine.thread.go_on()

    async def _read(
        self, engine: ServedEngine, stream: Stream, commands: AsyncIterator[engine_pb2.ConnectRequest]
    ) -> None:
        try:
            async for command in commands:
                if command.HasField("add"):
                    self._add(engine, stream, command.add)
                elif command.HasField("abort"):
                    self._abort(engine, stream, command.abort.id, _choice(command.abort))
                elif command.HasField("park"):
                    for number in stream.engine_ids.get(command.park.id, {}).values():
                        engine.thread.send(Park(number))
                elif command.HasField("unpark"):
                    for number in stream.engine_ids.get(command.unpark.id, {}).values():
                        engine.thread.send(Unpark(number))
                elif command.HasField("drop_cache"):
                    engine.thread.send(ResetCache())
        except Exception as error:
            stream.end(error)
        else:
            stream.end()

    def _add(self, engine: ServedEngine, stream: Stream, add: engine_pb2.AddRequest) -> None:
        if add.id in stream.engine_ids:
            raise InvalidArgument("add.id", f"{add.id} is in use on this stream")
        try:
            check_add(add)
        except RequestRefused as error:
            stream.refuse(add.id, error.field, str(error))
            return
        numbers = {choice: next(self._numbers) for choice in choices_of(add)}
        stream.engine_ids[add.id] = numbers.copy()
        self._requests.add(add, numbers)
        self._spans.begin(numbers.values(), add.traceparent)
        arrival = arrival_of(add, min(numbers.values()), time.monotonic())
        for choice, number in numbers.items():
            self._owners[number] = Owner(stream, add.id, choice)
        if add.HasField("constraint"):
            stream.compile(add.id, self._compile_and_start(engine, add, numbers, arrival))
        else:
            self._start(engine, add, numbers, arrival, None)

    async def _compile_and_start(
        self, engine: ServedEngine, add: engine_pb2.AddRequest, numbers: dict[int, int], arrival: int
    ) -> None:
        try:
            grammar = await engine.grammars.compile(add.constraint)
        except RequestRefused as error:
            self._refuse_all(numbers, error)
        else:
            self._start(engine, add, numbers, arrival, grammar)

    def _start(
        self,
        engine: ServedEngine,
        add: engine_pb2.AddRequest,
        numbers: dict[int, int],
        arrival: int,
        grammar: Grammar | None,
    ) -> None:
        """Hand a request to the engine, without the choices that were aborted while its grammar was compiled."""
        try:
            requests = to_requests(
                add,
                request_ids=list(numbers.values()),
                arrival=arrival,
                default_seed=(self._seed + min(numbers.values())) % 2**64,
                vocab_size=engine.info.vocab_size,
                grammar=grammar,
            )
        except RequestRefused as error:
            self._refuse_all(numbers, error)
        else:
            for request in requests:
                if request.request_id in self._owners:
                    engine.thread.send(Add(request))

    def _abort(self, engine: ServedEngine, stream: Stream, stream_id: int, choice: int | None = None) -> None:
        # The front door drops a single choice where its text has come to a stop string.
        reason = FinishReason.ABORT if choice is None else FinishReason.STOP
        for each, number in list(stream.engine_ids.get(stream_id, {}).items()):
            if choice is None or each == choice:
                self._forget(number)
                self._requests.drop(number, reason)
                self._spans.end(number, reason)
                engine.thread.send(Abort(number))
        if stream_id not in stream.engine_ids:
            stream.stop_compiling(stream_id)

    def _abort_all(self, engine: ServedEngine, stream: Stream) -> None:
        if stream.engine_ids:
            _log.info("stream ended with requests open", num_requests=len(stream.engine_ids))
        for stream_id in list(stream.engine_ids):
            self._abort(engine, stream, stream_id)

    def on_output(self, output: Output) -> None:
        """Hand what the engine thread brought to the streams it belongs to."""
        if isinstance(output, Refused):
            self._refuse(output)
            return
        if self._blocks is not None:
            self._blocks.record(output.cache_events)
        stalled = self._load.stalled
        self._load = to_load(output.load)
        self.tell_stalled(stalled)
        self._distribute(output)
        self._pace(self._ready.result())

    def tell_stalled(self, stalled: bool) -> None:
        """Tell all streams the load, and whether a step is stuck."""
        self._load.stalled = stalled
        for stream in self._streams:
            stream.pending().load.CopyFrom(self._load)

    def _distribute(self, result: StepResult) -> None:
        self._spans.take(result)
        owners = self._owners
        for told in result.prompt_logprobs:
            if (owner := owners.get(told.request_id)) is not None:
                owner.stream.add_prompt_logprobs(owner.stream_id, told)
        tokens = zip(result.request_ids, result.token_ids, strict=True)
        for entry, (request_id, token_id) in enumerate(tokens):
            # One that was aborted while the step ran has no owner any more.
            if (owner := owners.get(request_id)) is not None:
                owner.stream.add_token(owner.stream_id, owner.choice, token_id, result.logprobs.get(entry))
        for scheduled in result.scheduled:
            if (owner := owners.get(scheduled.request_id)) is not None:
                owner.stream.pending().scheduled.add(id=owner.stream_id, cached_tokens=scheduled.cached_tokens)
        for ended in result.ended:
            if (owner := self._forget(ended.request_id)) is not None:
                owner.stream.pending().ended.append(to_choice_end(ended, owner.stream_id, owner.choice))

    def _refuse_all(self, numbers: dict[int, int], error: RequestRefused) -> None:
        for number in numbers.values():
            self._refuse(Refused(number, error.field, str(error)))

    def _refuse(self, refused: Refused) -> None:
        """Tell of a request that is not taken. All its choices are refused alike, and told of once."""
        self._requests.refuse(refused.request_id)
        self._spans.refuse(refused.request_id)
        if (owner := self._forget(refused.request_id)) is not None:
            for number in list(owner.stream.engine_ids.get(owner.stream_id, {}).values()):
                self._forget(number)
            owner.stream.refuse(owner.stream_id, refused.field, refused.message)

    def _forget(self, number: int) -> Owner | None:
        owner = self._owners.pop(number, None)
        if owner is not None:
            choices = owner.stream.engine_ids[owner.stream_id]
            del choices[owner.choice]
            if not choices:
                del owner.stream.engine_ids[owner.stream_id]
        return owner


def _choice(abort: engine_pb2.AbortRequest) -> int | None:
    return abort.choice if abort.HasField("choice") else None
