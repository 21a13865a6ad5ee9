"""`python -m kvern.services.detokenizer`: one detokenizer process."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from kvern.services.detokenizer.engine_client import EngineClient
from kvern.services.detokenizer.incremental_decode import DecoderFactory
from kvern.services.detokenizer.metrics import DetokenizerMetrics, show_state
from kvern.services.detokenizer.servicer import ReplicaServicer
from kvern.services.detokenizer.settings import DetokenizerSettings
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.process import run_service
from kvern.services.runtime.server import GrpcServer
from kvern.services.runtime.status import Status
from kvern.services.runtime.text import TokenizerError, load_tokenizer
from kvern.v1 import replica_pb2_grpc

SERVICE = "kvern.v1.ReplicaService"


async def main(settings: DetokenizerSettings, status: Status) -> None:
    tokenizer = load_tokenizer(find_model(settings.model, weights=False))
    server = GrpcServer(settings, [SERVICE], status)
    metrics = DetokenizerMetrics(status.registry)

    def on_change(is_running: bool) -> None:
        if engine.info is not None:
            metrics.of(engine.info.model)  # from now on, so that a model without requests reads 0
        server.set_ready(is_running)

    engine = EngineClient(settings.engine, on_change, metrics.parks.inc)
    servicer = ReplicaServicer(engine, DecoderFactory(tokenizer), settings, metrics)
    show_state(status.registry, engine, servicer)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(servicer, server.grpc)
        await server.start()
        async with asyncio.TaskGroup() as tasks:
            connection = tasks.create_task(engine.run())
            # The server drains before the stream to the engine ends: it carries the calls in flight.
            async with stack.pop_all():
                await server.wait_for_stop()
                servicer.drain(settings.drain_delay_s + settings.drain_timeout_s)
            connection.cancel()


if __name__ == "__main__":
    run_service("detokenizer", DetokenizerSettings, main, expected_errors=(TokenizerError,))
