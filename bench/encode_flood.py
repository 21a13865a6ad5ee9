"""How a tokenizer process takes a flood of large texts: health, small texts, memory, and what it refuses.

python bench/encode_flood.py [--calls 200] [--megabytes 5] [--json]
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.services.runtime.channel import open_channel
from kvern.v1 import tokenizer_pb2, tokenizer_pb2_grpc

PROBE_INTERVAL_S = 0.1
SMALL_TEXT = "A question of the usual length. " * 100


@dataclass(frozen=True)
class Flood:
    """Times are of the slowest probe, one every PROBE_INTERVAL_S."""

    encoded: int
    refused: int
    total_s: float
    health_ms_max: float
    small_ms_max: float
    """For a text of a few thousand characters."""
    peak_rss_mb: float
    """Of the process, from its start."""


@asynccontextmanager
async def served(model: str) -> AsyncIterator[tuple[str, int]]:
    """Start a tokenizer, yield its address and process id, stop it."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/tokenizer.sock"
        command = [sys.executable, "-m", "kvern.services.tokenizer", "--model", model, "--listen", address]
        process = await asyncio.create_subprocess_exec(*command, "--drain-delay-s", "0", "--log-level", "error")
        try:
            async with open_channel(address) as channel:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            yield address, process.pid
        finally:
            process.kill()
            await process.wait()


async def measure(model: str, num_calls: int, text: str) -> Flood:
    """Send all calls at once, from a process of their own, and probe until all have ended."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as flooder:
        async with served(model) as (address, pid), open_channel(address) as channel:
            stub, health = tokenizer_pb2_grpc.TokenizerServiceStub(channel), health_pb2_grpc.HealthStub(channel)
            small = tokenizer_pb2.EncodePromptRequest(text=SMALL_TEXT)
            start = time.perf_counter()
            flooded = asyncio.wrap_future(flooder.submit(flood, address, num_calls, text))
            health_ms, small_ms = await asyncio.gather(
                slowest_ms(lambda: health.Check(health_pb2.HealthCheckRequest()), flooded),
                slowest_ms(lambda: stub.EncodePrompt(small), flooded),
            )
            outcomes = await flooded
            total_s = time.perf_counter() - start
            return Flood(outcomes["OK"], outcomes["RESOURCE_EXHAUSTED"], total_s, health_ms, small_ms, peak_rss_mb(pid))


async def slowest_ms(call: Callable[[], Awaitable[object]], end: asyncio.Future[Any]) -> float:
    """Call again and again until the end, and at least once."""
    slowest = 0.0
    while slowest == 0 or not end.done():
        start = time.perf_counter()
        await call()
        slowest = max(slowest, (time.perf_counter() - start) * 1000)
        await asyncio.sleep(PROBE_INTERVAL_S)
    return slowest


def flood(address: str, num_calls: int, text: str) -> Counter[str]:
    """Send all calls at once, wait for their ends, and count these by their names."""

    async def run() -> list[str]:
        async with open_channel(address) as channel:
            stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            request = tokenizer_pb2.EncodePromptRequest(text=text)
            return await asyncio.gather(*(outcome(stub.EncodePrompt(request)) for _ in range(num_calls)))

    return Counter(asyncio.run(run()))


async def outcome(call: Awaitable[object]) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def peak_rss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


@click.command()
@click.argument("model", default="smollm2")
@click.option("--calls", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--megabytes", type=click.FloatRange(min=0.01, max=30), default=5.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of text.")
def main(model: str, calls: int, megabytes: float, as_json: bool) -> None:
    """Send a tokenizer of MODEL many large texts at once."""
    manual = "".join(topics.values())
    size = int(megabytes * 1e6)
    result = asyncio.run(measure(model, calls, (manual * (1 + size // len(manual)))[:size]))
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    if as_json:
        print(json.dumps({"model": model, "machine": machine, "megabytes": megabytes, **asdict(result)}))
        return
    print(f"{model} on {machine}: {calls} texts of {megabytes} MB at once")
    print(f"{result.encoded} encoded, {result.refused} refused, in {result.total_s:.1f} s")
    print(f"slowest health check {result.health_ms_max:.0f} ms, small text {result.small_ms_max:.0f} ms")
    print(f"most memory {result.peak_rss_mb:,.0f} MB")


if __name__ == "__main__":
    main()
