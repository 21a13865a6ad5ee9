from __future__ import annotations

import asyncio

import httpx

from tests.up_process import PATIENCE_S


async def until_healthy(client: httpx.AsyncClient) -> None:
    """Wait until a gateway has started, and has heard from its router, which a busy machine may let answer late."""
    async with asyncio.timeout(PATIENCE_S):
        while not await _is_healthy(client):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _is_healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.ConnectError:
        return False
