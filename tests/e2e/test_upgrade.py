"""A rolling upgrade in the middle of the day: processes are replaced one after another, and no client notices."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.client import AsyncClient
from kvern.services.runtime.channel import open_channel
from tests.services.processes import running
from tests.up_process import PATIENCE_S, UpProcess, free_port, is_gone, wait_until

from .crowd import Crowd
from .fleet import NUM_REPLICAS, wait_ready

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 50


@asynccontextmanager
async def _router(replicas: UpProcess, port: int, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run one more router of a set, ready."""
    sockets = f"unix:{replicas.sockets}"
    address = f"127.0.0.1:{port}"
    flags = [
        f"--listen={address}",
        f"--tokenizer={sockets}/tokenizer.sock",
        f"--redis=unix://{replicas.sockets}/redis.sock",
    ]
    flags += [f"--replicas={sockets}/detokenizer-{index}.sock" for index in range(NUM_REPLICAS)]
    async with running("router", *flags, log=log) as router, open_channel(address) as channel:
        async with asyncio.timeout(PATIENCE_S):
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            watch.cancel()
        yield router


async def test_replicas_and_routers_restarted_one_after_another_break_no_stream(
    replicas: UpProcess, tmp_path: Path
) -> None:
    """G04: each waits for the streams that it has. The client knows all addresses that routers have in the end."""
    old, new = [free_port(), free_port()], [free_port(), free_port()]
    addresses = ",".join(f"127.0.0.1:{port}" for port in old + new)
    async with (
        _router(replicas, old[0], tmp_path / "0.log") as first,
        _router(replicas, old[1], tmp_path / "1.log") as second,
        AsyncClient(f"ipv4:{addresses}") as client,
    ):
        await wait_ready(client)
        undisturbed = await Crowd(client, NUM_STREAMS).run()
        for index in range(2):
            assert await _disturbed(client, _restart_replica(replicas, index)) == undisturbed
            await wait_ready(client)
        async with _router(replicas, new[0], tmp_path / "2.log"):
            assert await _disturbed(client, _stop(first)) == undisturbed
            async with _router(replicas, new[1], tmp_path / "3.log"):
                assert await _disturbed(client, _stop(second)) == undisturbed


async def _disturbed(client: AsyncClient, disturbance: Coroutine[Any, Any, None]) -> list[str]:
    """Return what many streams get while something happens in the middle of them, at the end of which it is done."""
    crowd = Crowd(client, NUM_STREAMS)
    running = asyncio.create_task(crowd.run())
    await crowd.under_way.wait()
    await disturbance
    return await running


async def _restart_replica(replicas: UpProcess, index: int) -> None:
    """End a replica; `kvern up` starts the next one."""
    pids = [replicas.children()[f"{service}-{index}"] for service in ("detokenizer", "engine")]
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    await asyncio.to_thread(wait_until, lambda: all(map(is_gone, pids)), "the replica has ended")


async def _stop(router: asyncio.subprocess.Process) -> None:
    router.terminate()
    assert await router.wait() == 0
