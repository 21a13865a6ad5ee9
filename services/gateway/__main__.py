"""`python -m kvern.services.gateway`: one HTTP gateway process."""

from __future__ import annotations

import asyncio

from kvern.services.gateway.app import Gateway
from kvern.services.gateway.chat_request import OutputFormats
from kvern.services.gateway.http_server import serve
from kvern.services.gateway.metrics import GatewayMetrics
from kvern.services.gateway.settings import GatewaySettings
from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.process import run_service
from kvern.services.runtime.status import Status
from kvern.services.runtime.tls import client_tls


async def main(settings: GatewaySettings, status: Status) -> None:
    async with open_channel(settings.router, tls=client_tls(settings)) as channel:
        formats = OutputFormats(settings.tool_call_parser, settings.reasoning_parser)
        gateway = Gateway(channel, status.registry, formats, status.tracer)

        def set_ready(is_ready: bool) -> None:
            status.is_ready = is_ready

        def on_drain() -> None:
            gateway.is_draining = True
            set_ready(False)

        watching = asyncio.create_task(gateway.watch(set_ready))
        try:
            await serve(gateway.app(GatewayMetrics(status.registry)), settings, on_drain)
        finally:
            watching.cancel()


if __name__ == "__main__":
    run_service("gateway", GatewaySettings, main)
