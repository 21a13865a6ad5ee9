"""`python -m kvern.services.gateway`: one HTTP gateway process."""

from __future__ import annotations

from kvern.services.gateway.app import Gateway
from kvern.services.gateway.http_server import serve
from kvern.services.gateway.settings import GatewaySettings
from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.process import run_service
from kvern.services.runtime.status import Status


async def main(settings: GatewaySettings, status: Status) -> None:
    async with open_channel(settings.router) as channel:
        gateway = Gateway(channel)

        def on_drain() -> None:
            gateway.is_draining = True

        await serve(gateway.app, settings, on_drain)


if __name__ == "__main__":
    run_service("gateway", GatewaySettings, main)
