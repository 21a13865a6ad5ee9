"""`python -m kvern.services.detokenizer`: one detokenizer process."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from kvern.services.detokenizer.callers import INFERENCE_SERVICE, Callers
from kvern.services.detokenizer.engine_client import EngineClient
from kvern.services.detokenizer.front_door import FrontDoor
from kvern.services.detokenizer.incremental_decode import DecoderFactory
from kvern.services.detokenizer.inference import InferenceServicer, add_to_server
from kvern.services.detokenizer.metrics import DetokenizerMetrics, show_state
from kvern.services.detokenizer.servicer import ReplicaServicer
from kvern.services.detokenizer.settings import DetokenizerSettings
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.process import run_service
from kvern.services.runtime.server import GrpcServer
from kvern.services.runtime.status import Status
from kvern.services.runtime.text import TokenizerError, load_tokenizer
from kvern.services.runtime.ticket import TicketKeys
from kvern.services.runtime.tls import client_tls
from kvern.v1 import replica_pb2_grpc

SERVICE = "kvern.v1.ReplicaService"


async def main(settings: DetokenizerSettings, status: Status) -> None:
    source = find_model(settings.model, weights=False)
    tokenizer = load_tokenizer(source)
    tickets = None if settings.ticket_key_file is None else TicketKeys(settings.ticket_key_file)
    callers = Callers(settings.router_identities, tickets)
    server = GrpcServer(settings, [SERVICE, INFERENCE_SERVICE], status, callers.admit)
    metrics = DetokenizerMetrics(status.registry)

    def on_change(is_running: bool) -> None:
        if engine.info is not None:
            metrics.of(engine.info.model)  # from now on, so that a model without requests reads 0
        server.set_ready(is_running)

    engine = EngineClient(settings.engine, on_change, metrics.parks.inc, client_tls(settings))
    door = FrontDoor(engine, DecoderFactory(tokenizer), settings, metrics)
    show_state(status.registry, engine, door)
    async with AsyncExitStack() as stack:
        smg = None
        if settings.smg_listen is not None:
            # Imported here: nobody else pays for its messages. Entered first, so that it is there until all have ended.
            from kvern.services.detokenizer.smg.server import serving_smg
            from kvern.services.detokenizer.smg.servicer import SmgServicer

            smg = SmgServicer(door, source, tokenizer, settings)
            await stack.enter_async_context(serving_smg(smg, settings.smg_listen, server.observers))
        await stack.enter_async_context(server)
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(ReplicaServicer(door), server.grpc)
        add_to_server(InferenceServicer(door, callers), server.grpc)
        await server.start()
        async with asyncio.TaskGroup() as tasks:
            connection = tasks.create_task(engine.run())
            # The server drains before the stream to the engine ends: it carries the calls in flight.
            async with stack.pop_all():
                await server.wait_for_stop()
                door.drain(settings.drain_delay_s + settings.drain_timeout_s)
                if smg is not None:
                    smg.drain()
            connection.cancel()


if __name__ == "__main__":
    run_service("detokenizer", DetokenizerSettings, main, expected_errors=(TokenizerError,))
