from __future__ import annotations

import asyncio

import httpx


async def until_listening(client: httpx.AsyncClient) -> None:
    """Wait until a gateway that is starting takes connections."""
    async with asyncio.timeout(20):
        while True:
            try:
                await client.get("/health")
            except httpx.ConnectError:
                await asyncio.sleep(0.05)
            else:
                return
