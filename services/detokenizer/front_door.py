"""A replica's front door: it admits requests, passes them to the engine, and streams back what comes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kvern.services.detokenizer.admission import to_add_request
from kvern.services.detokenizer.engine_client import EngineClient
from kvern.services.detokenizer.engine_request import EngineRequest
from kvern.services.detokenizer.frames import Frames
from kvern.services.detokenizer.generation import Generation
from kvern.services.detokenizer.incremental_decode import DecoderFactory
from kvern.services.detokenizer.metrics import DetokenizerMetrics
from kvern.services.detokenizer.request_log import DirectRecord
from kvern.services.detokenizer.settings import DetokenizerSettings
from kvern.services.runtime.deadline import check_reachable
from kvern.services.runtime.errors import ResourceExhausted, Unavailable
from kvern.services.runtime.interceptors import end_call
from kvern.services.runtime.slow_reader import ReaderWatch
from kvern.services.runtime.tracing import Span, current_span
from kvern.v1 import engine_pb2, replica_pb2

RETRY_AFTER_S = 1.0
"""What a client is told to wait when all streams are taken."""

DRAINING = "DRAINING"

MOVE_S = 1.0
"""How long before the end of a drain the streams that still run are sent elsewhere, in seconds: their readers need it
to take what was written to them."""

_Frame = TypeVar("_Frame")


@dataclass(slots=True, eq=False)
class _Call:
    """A call that runs."""

    task: asyncio.Task[Any]
    is_resumable: bool
    engine_request: EngineRequest | None = None
    """What the engine has of it."""


class FrontDoor:
    """What the services of a replica share, whatever protocol they speak."""

    def __init__(
        self, engine: EngineClient, decoders: DecoderFactory, settings: DetokenizerSettings, metrics: DetokenizerMetrics
    ) -> None:
        self.engine = engine
        self.is_set_aside = False
        """Whether an operator wants it to take nothing new."""
        self._is_ending = False
        self.max_streams = settings.max_streams
        self._decoders = decoders
        self._metrics = metrics
        self._max_parked_s = settings.max_parked_s
        self._calls: set[_Call] = set()

    @property
    def num_streams(self) -> int:
        return len(self._calls)

    @property
    def is_draining(self) -> bool:
        """Whether it takes nothing new."""
        return self._is_ending or self.is_set_aside

    @property
    def state(self) -> replica_pb2.ReplicaState.ValueType:
        if self.is_draining:
            return replica_pb2.REPLICA_STATE_DRAINING
        if self.engine.info is None:
            return replica_pb2.REPLICA_STATE_STARTING
        return replica_pb2.REPLICA_STATE_READY

    def load(self) -> replica_pb2.ReplicaLoad:
        """Return how busy the replica is."""
        load = replica_pb2.ReplicaLoad()
        load.CopyFrom(self.engine.load)
        load.num_streams = self.num_streams
        load.num_parked = self.engine.num_parked
        load.predicted_wait_s = self.engine.predicted_wait_s
        return load

    def drain(self, grace_s: float) -> None:
        """Say that nothing more should come. What routers send all the same is served as long as the server takes it.

        Requests that stand still and can go on elsewhere do so at once, what still runs ends shortly before `grace_s`
        seconds have passed.
        """
        self._is_ending = True
        for call in self._calls:
            request = call.engine_request
            if call.is_resumable and request is not None and request.is_parked:
                _send_elsewhere(call)
        asyncio.get_running_loop().call_later(grace_s - min(MOVE_S, grace_s / 2), self._send_all_elsewhere)

    async def run(
        self,
        serve: replica_pb2.ServeRequest,
        frames: Frames[_Frame],
        remaining_s: float | None,
        record: DirectRecord | None = None,
    ) -> AsyncGenerator[_Frame, None]:
        """Run a request in the task of its call, and yield what is to be written.

        remaining_s: until the call's deadline, None if it has none. record: is told how many tokens came of it. Raises
        ServiceError.
        """
        arrived_at = time.monotonic()
        reader = ReaderWatch(self._max_parked_s)
        with self._metrics.counting_sheds(reader), self._place(serve, frames.is_resumable) as call, reader:
            if not serve.moved:
                check_reachable(self.engine.predicted_wait_s, remaining_s)
            async with aclosing(self._generate(call, serve, frames, arrived_at, reader, record)) as made:
                async for frame in made:
                    yield frame

    @contextmanager
    def _place(self, serve: replica_pb2.ServeRequest, is_resumable: bool) -> Iterator[_Call]:
        """Hold a place for the call that enters. Raises ResourceExhausted where there is none."""
        if self.num_streams >= self.max_streams and not serve.moved:
            raise ResourceExhausted(f"all {self.max_streams} streams are taken", retry_after_s=RETRY_AFTER_S)
        task = asyncio.current_task()
        assert task is not None
        call = _Call(task, is_resumable)
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.remove(call)

    def _send_all_elsewhere(self) -> None:
        for call in self._calls:
            _send_elsewhere(call)

    async def _generate(
        self,
        call: _Call,
        serve: replica_pb2.ServeRequest,
        frames: Frames[_Frame],
        arrived_at: float,
        reader: ReaderWatch,
        record: DirectRecord | None,
    ) -> AsyncGenerator[_Frame, None]:
        engine, info = self.engine, self.engine.info
        if info is None:
            raise Unavailable("the engine is away")
        add = to_add_request(serve, info)
        add.arrived_ns = round(arrived_at * 1e9)
        metrics = self._metrics.of(info.model)
        generation = Generation(serve.request, info, self._decoders, arrived_at, metrics, frames)
        with metrics.timing(arrived_at), generation.counting_ends():
            add.resumed.extend(await generation.replay(add.stopping.max_tokens))
            unfinished = generation.unfinished
            _describe(span := current_span(), serve, add)
            add.traceparent = span.traceparent
            engine_request = engine.submit(add, unfinished, reader) if unfinished else None
            call.engine_request = engine_request
            if engine_request is None:
                reader.hold()  # all that is missing is that it reads
            try:
                async for frame in generation.frames(engine_request):
                    yield frame
            finally:
                span.set({"gen_ai.usage.output_tokens": generation.num_tokens})
                if record is not None:
                    record.completion_tokens, record.verdict = generation.num_tokens, reader.verdict
                if engine_request is not None:
                    engine.release(engine_request)


def _describe(span: Span, serve: replica_pb2.ServeRequest, add: engine_pb2.AddRequest) -> None:
    if span.is_recording:
        span.set(
            {
                "kvern.request_id": serve.request.request_id,
                "gen_ai.request.model": serve.request.model,
                "gen_ai.request.max_tokens": add.stopping.max_tokens,
                "gen_ai.usage.input_tokens": len(add.prompt_token_ids),
                "kvern.moved": serve.moved,
            }
        )


def _send_elsewhere(call: _Call) -> None:
    end_call(call.task, Unavailable("this replica drains", reason=DRAINING))
