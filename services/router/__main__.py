"""`python -m kvern.services.router`: one router process."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from kvern.services.router.replicas import ReplicaTable
from kvern.services.router.servicer import (
    INFERENCE_SERVICE,
    ROUTER_SERVICE,
    InferenceServicer,
    RouterServicer,
    add_to_server,
)
from kvern.services.router.settings import RouterSettings
from kvern.services.router.tokenizer import Tokenizer
from kvern.services.runtime.process import run_service
from kvern.services.runtime.server import GrpcServer


async def main(settings: RouterSettings) -> None:
    server = GrpcServer(settings, [INFERENCE_SERVICE, ROUTER_SERVICE])

    def update_readiness() -> None:
        server.set_ready(tokenizer.is_serving and table.has_ready)

    tokenizer = Tokenizer(settings.tokenizer, update_readiness)
    table = ReplicaTable(settings.replicas, update_readiness)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        inference = InferenceServicer(tokenizer, table, settings.max_streams, settings.max_stalled_s)
        add_to_server(inference, RouterServicer(table), server.grpc)
        await server.start()
        async with asyncio.TaskGroup() as tasks:
            watchers = [tasks.create_task(tokenizer.watch()), tasks.create_task(table.watch())]
            # The server drains before its watchers end: calls in flight still need a true view.
            async with stack.pop_all():
                await server.wait_for_stop()
            for watcher in watchers:
                watcher.cancel()
    await tokenizer.close()
    await table.close()


if __name__ == "__main__":
    run_service("router", RouterSettings, main)
