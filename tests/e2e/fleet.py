"""Several replicas, and what tests ask of them."""

from __future__ import annotations

import asyncio

from kvern.client import AsyncClient, RetryPolicy, Unreachable
from tests.up_process import PATIENCE_S

NUM_REPLICAS = 3

BUDGET = "--index-budget-ms=1000"
"""Enough on any machine: a prompt whose lookup takes longer goes anywhere."""

NO_HELP = RetryPolicy(max_retries=0, max_resumptions=0)
"""The client alone could resume: it must not have to."""


async def wait_ready(client: AsyncClient, num_replicas: int = NUM_REPLICAS) -> None:
    """Wait until the router, which may still be starting, sees all replicas ready, whatever they were a moment ago."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await _num_ready(client) == num_replicas:
                return
            await asyncio.sleep(0.05)


async def _num_ready(client: AsyncClient) -> int:
    try:
        return sum(model.ready_replicas for model in (await client.list_models()).models)
    except Unreachable:
        return 0
