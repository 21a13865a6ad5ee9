"""ReplicaService: a replica's front door."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from kvern.services.detokenizer.admission import to_add_request
from kvern.services.detokenizer.engine_client import EngineClient
from kvern.services.detokenizer.generation import Generation
from kvern.services.detokenizer.incremental_decode import DecoderFactory
from kvern.services.detokenizer.settings import DetokenizerSettings
from kvern.services.runtime.errors import ResourceExhausted, Unavailable
from kvern.services.runtime.slow_reader import ReaderWatch
from kvern.v1 import replica_pb2, replica_pb2_grpc

RETRY_AFTER_S = 1.0
"""What a client is told to wait when all streams are taken."""

_Context = grpc.aio.ServicerContext[Any, Any]


class ReplicaServicer(replica_pb2_grpc.ReplicaServiceServicer):
    """Admits requests, passes them to the engine, and streams back text."""

    def __init__(self, engine: EngineClient, decoders: DecoderFactory, settings: DetokenizerSettings) -> None:
        self._engine = engine
        self._decoders = decoders
        self._max_streams = settings.max_streams
        self._max_parked_s = settings.max_parked_s
        self._num_streams = 0
        self._is_draining = False

    def drain(self) -> None:
        """Tell routers to send nothing more. What comes all the same is served as long as the server takes it."""
        self._is_draining = True

    async def Serve(
        self, request: replica_pb2.ServeRequest, context: _Context
    ) -> AsyncIterator[replica_pb2.ServeResponse]:
        arrived_at = time.monotonic()
        if self._num_streams >= self._max_streams:
            raise ResourceExhausted(f"all {self._max_streams} streams are taken", retry_after_s=RETRY_AFTER_S)
        self._num_streams += 1
        try:
            with ReaderWatch(self._max_parked_s) as reader:
                async with aclosing(self._generate(request, arrived_at, context.time_remaining(), reader)) as frames:
                    async for frame in frames:
                        yield frame
        finally:
            self._num_streams -= 1

    async def GetReplicaInfo(
        self, request: replica_pb2.GetReplicaInfoRequest, context: _Context
    ) -> replica_pb2.GetReplicaInfoResponse:
        response = replica_pb2.GetReplicaInfoResponse(
            state=self._state, engine=self._engine.info, load=self._engine.load
        )
        response.load.num_streams = self._num_streams
        response.load.num_parked = self._engine.num_parked
        return response

    @property
    def _state(self) -> replica_pb2.ReplicaState.ValueType:
        if self._is_draining:
            return replica_pb2.REPLICA_STATE_DRAINING
        if self._engine.info is None:
            return replica_pb2.REPLICA_STATE_STARTING
        return replica_pb2.REPLICA_STATE_READY

    async def _generate(
        self, serve: replica_pb2.ServeRequest, arrived_at: float, time_remaining_s: float | None, reader: ReaderWatch
    ) -> AsyncGenerator[replica_pb2.ServeResponse, None]:
        engine, info = self._engine, self._engine.info
        if info is None:
            raise Unavailable("the engine is away")
        engine.prefill_speed.check_deadline(time_remaining_s, engine.load.queued_prefill_tokens, arrived_at)
        add = to_add_request(serve, info)
        generation = Generation(serve.request, info, self._decoders, arrived_at)
        add.resumed.extend(await generation.replay(add.stopping.max_tokens))
        unfinished = generation.unfinished
        engine_request = engine.submit(add, unfinished, reader) if unfinished else None
        if engine_request is None:
            reader.hold()  # all that is missing is that it reads
        try:
            async for frame in generation.frames(engine_request):
                yield frame
        finally:
            if engine_request is not None:
                engine.release(engine_request)
