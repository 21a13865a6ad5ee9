"""Several replicas, and what tests ask of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable

from kvern.client import AsyncClient, RetryPolicy, Unreachable
from tests.up_process import PATIENCE_S, UpProcess

NUM_REPLICAS = 3

BUDGET = "--index-budget-ms=5000"
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


def kill_amid_streams(replicas: UpProcess, names: Iterable[str]) -> bool:
    """Kill the first of these services whose replica has streams. Engines stand still meanwhile, so that none ends.

    names: of engines or detokenizers. Returns whether there was one: streams may all have ended before.
    """
    pids = replicas.children()
    still = {name: pid for name, pid in pids.items() if name.startswith("engine-")}
    for pid in still.values():
        os.kill(pid, signal.SIGSTOP)
    try:
        for name in names:
            if replicas.load(int(name.rpartition("-")[2])).num_streams:
                still.pop(name, None)
                os.kill(pids[name], signal.SIGKILL)
                return True
        return False
    finally:
        for pid in still.values():
            os.kill(pid, signal.SIGCONT)


async def _num_ready(client: AsyncClient) -> int:
    try:
        return sum(model.ready_replicas for model in (await client.list_models()).models)
    except Unreachable:
        return 0
