"""The listener of SMG's door."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import structlog
from smg_grpc_proto import vllm_engine_pb2_grpc

from kvern.services.detokenizer.front_door import MOVE_S
from kvern.services.detokenizer.smg.servicer import SmgServicer
from kvern.services.runtime.channel import SERVER_OPTIONS
from kvern.services.runtime.interceptors import ErrorInterceptor
from kvern.services.runtime.listen import bind

_OPTIONS = [
    *SERVER_OPTIONS,
    # SMG pings connections that carry nothing, every 30 s.
    ("grpc.keepalive_permit_without_calls", 1),
]

_log = structlog.get_logger("kvern.smg")


@asynccontextmanager
async def serving_smg(
    servicer: SmgServicer, address: str, observers: Sequence[grpc.aio.ServerInterceptor]
) -> AsyncIterator[None]:
    """Serve on `host:port`, in plaintext, while the block runs; its end waits for the calls that run.

    observers: interceptors that count and trace calls. Raises ListenError.
    """
    server = grpc.aio.server(interceptors=[*observers, ErrorInterceptor()], options=_OPTIONS)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
    bind(server, address)
    await server.start()
    _log.info("listening", address=address)
    try:
        yield
        await servicer.wait_until_idle()
    finally:
        await server.stop(MOVE_S)
