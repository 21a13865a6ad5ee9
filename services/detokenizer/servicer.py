"""ReplicaService: a replica's front door."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from kvern.services.detokenizer.admission import to_add_request
from kvern.services.detokenizer.engine_client import EngineClient
from kvern.services.detokenizer.engine_request import EngineRequest
from kvern.services.detokenizer.generation import Generation
from kvern.services.detokenizer.incremental_decode import DecoderFactory
from kvern.services.detokenizer.metrics import DetokenizerMetrics
from kvern.services.detokenizer.settings import DetokenizerSettings
from kvern.services.runtime.deadline import check_reachable
from kvern.services.runtime.errors import ResourceExhausted, Unavailable
from kvern.services.runtime.interceptors import end_call
from kvern.services.runtime.slow_reader import ReaderWatch
from kvern.services.runtime.tracing import Span, current_span
from kvern.v1 import engine_pb2, replica_pb2, replica_pb2_grpc

RETRY_AFTER_S = 1.0
"""What a client is told to wait when all streams are taken."""

DRAINING = "DRAINING"

MOVE_S = 1.0
"""How long before the end of a drain the streams that still run are sent elsewhere, in seconds: their readers need it
to take what was written to them."""

_Context = grpc.aio.ServicerContext[Any, Any]


class ReplicaServicer(replica_pb2_grpc.ReplicaServiceServicer):
    """Admits requests, passes them to the engine, and streams back text."""

    def __init__(
        self, engine: EngineClient, decoders: DecoderFactory, settings: DetokenizerSettings, metrics: DetokenizerMetrics
    ) -> None:
        self._engine = engine
        self._decoders = decoders
        self._metrics = metrics
        self.max_streams = settings.max_streams
        self._max_parked_s = settings.max_parked_s
        self._calls: dict[asyncio.Task[Any], EngineRequest | None] = {}
        """Those that run, with what the engine has of them."""
        self._is_draining = False

    def drain(self, grace_s: float) -> None:
        """Tell routers to send nothing more. What comes all the same is served as long as the server takes it.

        Requests that stand still go on elsewhere at once, what still runs does so shortly before `grace_s` seconds have
        passed.
        """
        self._is_draining = True
        for call, request in self._calls.items():
            if request is not None and request.is_parked:
                _send_elsewhere(call)
        asyncio.get_running_loop().call_later(grace_s - min(MOVE_S, grace_s / 2), self._send_all_elsewhere)

    async def Serve(
        self, request: replica_pb2.ServeRequest, context: _Context
    ) -> AsyncIterator[replica_pb2.ServeResponse]:
        arrived_at = time.monotonic()
        reader = ReaderWatch(self._max_parked_s)
        with self._metrics.counting_sheds(reader), self._place(request) as call, reader:
            async with aclosing(self._generate(call, request, arrived_at, context, reader)) as frames:
                async for frame in frames:
                    yield frame

    async def GetReplicaInfo(
        self, request: replica_pb2.GetReplicaInfoRequest, context: _Context
    ) -> replica_pb2.GetReplicaInfoResponse:
        response = replica_pb2.GetReplicaInfoResponse(
            state=self._state, engine=self._engine.info, load=self._engine.load
        )
        response.load.num_streams = self.num_streams
        response.load.num_parked = self._engine.num_parked
        response.load.predicted_wait_s = self._engine.predicted_wait_s
        return response

    @property
    def num_streams(self) -> int:
        return len(self._calls)

    @contextmanager
    def _place(self, request: replica_pb2.ServeRequest) -> Iterator[asyncio.Task[Any]]:
        """Hold a place for the call that enters, and yield its task. Raises ResourceExhausted where there is none."""
        if self.num_streams >= self.max_streams and not request.moved:
            raise ResourceExhausted(f"all {self.max_streams} streams are taken", retry_after_s=RETRY_AFTER_S)
        call = asyncio.current_task()
        assert call is not None
        self._calls[call] = None
        try:
            yield call
        finally:
            del self._calls[call]

    @property
    def _state(self) -> replica_pb2.ReplicaState.ValueType:
        if self._is_draining:
            return replica_pb2.REPLICA_STATE_DRAINING
        if self._engine.info is None:
            return replica_pb2.REPLICA_STATE_STARTING
        return replica_pb2.REPLICA_STATE_READY

    def _send_all_elsewhere(self) -> None:
        for call in self._calls:
            _send_elsewhere(call)

    async def _generate(
        self,
        call: asyncio.Task[Any],
        serve: replica_pb2.ServeRequest,
        arrived_at: float,
        context: _Context,
        reader: ReaderWatch,
    ) -> AsyncGenerator[replica_pb2.ServeResponse, None]:
        engine, info = self._engine, self._engine.info
        if info is None:
            raise Unavailable("the engine is away")
        if not serve.moved:
            check_reachable(engine.predicted_wait_s, context.time_remaining())
        add = to_add_request(serve, info)
        add.arrived_ns = round(arrived_at * 1e9)
        metrics = self._metrics.of(info.model)
        generation = Generation(serve.request, info, self._decoders, arrived_at, metrics)
        with metrics.timing(arrived_at), generation.counting_ends():
            add.resumed.extend(await generation.replay(add.stopping.max_tokens))
            unfinished = generation.unfinished
            _describe(span := current_span(), serve, add)
            add.traceparent = span.traceparent
            engine_request = engine.submit(add, unfinished, reader) if unfinished else None
            self._calls[call] = engine_request
            if engine_request is None:
                reader.hold()  # all that is missing is that it reads
            try:
                async for frame in generation.frames(engine_request):
                    yield frame
            finally:
                span.set({"gen_ai.usage.output_tokens": generation.num_tokens})
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


def _send_elsewhere(call: asyncio.Task[Any]) -> None:
    end_call(call, Unavailable("this replica drains", reason=DRAINING))
