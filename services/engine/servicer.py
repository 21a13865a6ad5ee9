"""EngineService: many requests on one stream, one StepOutput a step."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc
import structlog

from kvern.engine.core import Abort, Add, Output, Refused
from kvern.engine.errors import RequestRefused
from kvern.engine.plan import StepResult
from kvern.services.engine.convert import to_choice_end, to_load, to_request
from kvern.services.engine.engine_thread import EngineThread
from kvern.v1 import engine_pb2, engine_pb2_grpc, replica_pb2

_log = structlog.get_logger("kvern.engine")


class Stream:
    """One Connect call: its requests, and what is to be written to it. While a message is being written, what the next
    steps bring merges into one."""

    def __init__(self) -> None:
        self.engine_ids: dict[int, int] = {}
        """Stream's id to engine-wide id, of requests that have not ended."""
        self.ended = False
        self.error: Exception | None = None
        self._pending: engine_pb2.StepOutput | None = None
        self._wake = asyncio.Event()

    def pending(self) -> engine_pb2.StepOutput:
        """Return the output being gathered, to be added to."""
        if self._pending is None:
            self._pending = engine_pb2.StepOutput()
            self._wake.set()
        return self._pending

    def end(self, error: Exception | None = None) -> None:
        self.ended, self.error = True, error
        self._wake.set()

    async def next_output(self) -> engine_pb2.StepOutput | None:
        """Wait for something to write. None: the stream has ended. Raises what broke it."""
        await self._wake.wait()
        self._wake.clear()
        if self.error is not None:
            raise self.error
        output, self._pending = self._pending, None
        return None if self.ended else output


class ServedEngine(NamedTuple):
    """A loaded engine and what it says of itself."""

    thread: EngineThread
    info: replica_pb2.EngineInfo


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Maps streams' requests to the engine's, and the engine's outputs back."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers = itertools.count(1)
        self._owners: dict[int, tuple[Stream, int]] = {}
        self._streams: set[Stream] = set()
        self._ready: asyncio.Future[ServedEngine] = asyncio.get_running_loop().create_future()

    def start_serving(self, engine: EngineThread, info: replica_pb2.EngineInfo) -> None:
        """Let streams begin. Those that came while the model was loading have waited."""
        self._ready.set_result(ServedEngine(engine, info))

    async def Connect(
        self, request_iterator: AsyncIterator[engine_pb2.ConnectRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[engine_pb2.ConnectResponse]:
        engine = await asyncio.shield(self._ready)
        stream = Stream()
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(engine, stream, request_iterator))
        try:
            yield engine_pb2.ConnectResponse(hello=engine_pb2.Hello(info=engine.info))
            while (output := await stream.next_output()) is not None:
                yield engine_pb2.ConnectResponse(step=output)
        finally:
            reader.cancel()
            self._streams.discard(stream)
            self._abort_all(engine, stream)

    async def _read(
        self, engine: ServedEngine, stream: Stream, commands: AsyncIterator[engine_pb2.ConnectRequest]
    ) -> None:
        try:
            async for command in commands:
                if command.HasField("add"):
                    self._add(engine, stream, command.add)
                elif command.HasField("abort"):
                    self._abort(engine, stream, command.abort.id)
        except Exception as error:
            stream.end(error)
        else:
            stream.end()

    def _add(self, engine: ServedEngine, stream: Stream, add: engine_pb2.AddRequest) -> None:
        number = next(self._numbers)
        if add.id in stream.engine_ids:
            raise ValueError(f"id {add.id} is in use on this stream")
        stream.engine_ids[add.id] = number
        self._owners[number] = (stream, add.id)
        try:
            request = to_request(
                add,
                request_id=number,
                arrival=number,
                default_seed=(self._seed + number) % 2**64,
                vocab_size=engine.info.vocab_size,
            )
        except RequestRefused as error:
            self._refuse(Refused(number, error.field, str(error)))
        else:
            engine.thread.send(Add(request))

    def _abort(self, engine: ServedEngine, stream: Stream, stream_id: int) -> None:
        number = stream.engine_ids.pop(stream_id, None)
        if number is not None:
            del self._owners[number]
            engine.thread.send(Abort(number))

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
        load = to_load(output.load)
        for stream in self._streams:
            stream.pending().load.CopyFrom(load)
        self._distribute(output)

    def _distribute(self, result: StepResult) -> None:
        owners = self._owners
        for request_id, token_id in zip(result.request_ids, result.token_ids, strict=True):
            # One that was aborted while the step ran has no owner any more.
            if (owner := owners.get(request_id)) is not None:
                pending = owner[0].pending()
                pending.ids.append(owner[1])
                pending.token_ids.append(token_id)
        for scheduled in result.scheduled:
            if (owner := owners.get(scheduled.request_id)) is not None:
                owner[0].pending().scheduled.add(id=owner[1], cached_tokens=scheduled.cached_tokens)
        for ended in result.ended:
            if (owner := self._forget(ended.request_id)) is not None:
                owner[0].pending().ended.append(to_choice_end(ended, owner[1]))

    def _refuse(self, refused: Refused) -> None:
        if (owner := self._forget(refused.request_id)) is not None:
            refusal = engine_pb2.Refusal(field=refused.field, message=refused.message)
            owner[0].pending().ended.append(engine_pb2.ChoiceEnd(id=owner[1], refusal=refusal))

    def _forget(self, request_id: int) -> tuple[Stream, int] | None:
        owner = self._owners.pop(request_id, None)
        if owner is not None:
            owner[0].engine_ids.pop(owner[1], None)
        return owner
