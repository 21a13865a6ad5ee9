"""How many tokens a second get from an engine to clients, what each process pays for them, and what latency they add.

    python bench/stream.py [--json]
    python bench/stream.py --slow-reader [--json]

A synthetic engine takes the model's place; detokenizer, tokenizer and router are the real processes, and clients are
processes of their own. First as fast as it goes: to a reader of the engine's own stream, through the detokenizer, and
through detokenizer and router. Then, with every token timed, at a pace that makes a part of the last rate: with as
many streams, whose tokens come in one burst each step, and with a tenth of them.

With --slow-reader, what one client that reads a message a second does to 31 that keep up.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import quantiles
from typing import Any

import click
import grpc
from linear_decode import linear_ratio
from rich import box
from rich.console import Console
from rich.table import Table
from stream_clients import Door, Received, Workload, run_clients, run_slow_client
from stream_services import Services, running

from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import Tokenizer, load_tokenizer
from kvern.v1 import replica_pb2
from kvern.v1.replica_pb2_grpc import ReplicaServiceStub

NUM_CLIENT_PROCESSES = 2
PACED_S = 5
"""How long a run at a part of the greatest rate lasts, in seconds."""

NUM_QUICK_STREAMS = 31
SLOW_INTERVAL_S = 1.0
"""Between two messages that the slow reader reads."""
SLOW_OVERTIME_S = 5
"""How much longer the slow reader stays than the others."""

_ON_THE_WAY: dict[Door, tuple[str, ...]] = {
    "engine": ("engine",),
    "detokenizer": ("engine", "detokenizer"),
    "router": ("engine", "detokenizer", "router"),
}


@dataclass(frozen=True)
class Flow:
    """One run from the engine to the clients."""

    door: Door
    num_streams: int
    steps_per_s: int
    """0: as fast as it went."""
    tokens_per_s: float
    tokens_per_message: float
    cpu_share: dict[str, float]
    """CPU seconds a second, of each process that had a part in it."""
    cpu_s_per_million: dict[str, float]
    """CPU seconds for a million tokens, of each process."""
    added_ms: tuple[float, float]
    """From the engine's sending a token until a client has it: median and 99th percentile. Zeros at full speed."""
    gap_ms: tuple[float, float]
    """Between messages of one stream: likewise."""

    @property
    def limit(self) -> str:
        """The process that had least time to spare."""
        return max(self.cpu_share, key=lambda name: self.cpu_share[name])

    def tokens_per_core(self, name: str) -> float:
        """Return the tokens that one CPU second of a process brings."""
        return 1e6 / self.cpu_s_per_million[name]


class Bench:
    """Sends load through the services and sums up what came."""

    def __init__(self, services: Services, pool: ProcessPoolExecutor) -> None:
        self.services = services
        self.pool = pool

    def workload(self, door: Door, num_streams: int, num_tokens: int, steps_per_s: int = 0) -> Workload:
        return Workload(
            door=door,
            address=self.services.address(door),
            sent_at=self.services.sent_at,
            num_streams=num_streams,
            batch_size=num_streams,
            num_tokens=num_tokens,
            steps_per_s=steps_per_s,
        )

    def run(self, workload: Workload) -> Flow:
        """Run a workload's streams, spread over the processes of clients."""
        pace = f"{workload.steps_per_s} steps/s" if workload.steps_per_s else "full speed"
        click.echo(f"measuring: {workload.num_streams} streams from the {workload.door}, {pace}", err=True)
        names = _ON_THE_WAY[workload.door]
        before = {name: self.services.cpu_s(name) for name in names}
        results = list(self.pool.map(run_clients, _parts(workload)))
        cpu_s = {name: self.services.cpu_s(name) - before[name] for name in names}
        cpu_s |= {f"clients {number}": result.cpu_s for number, result in enumerate(results, start=1)}
        return summarize(workload, results, cpu_s)


def _parts(workload: Workload) -> list[Workload]:
    count = 1 if workload.door == "engine" else min(NUM_CLIENT_PROCESSES, workload.num_streams)
    sizes = [len(range(number, workload.num_streams, count)) for number in range(count)]
    return [replace(workload, num_streams=size) for size in sizes]


def summarize(workload: Workload, results: Sequence[Received], cpu_s: dict[str, float]) -> Flow:
    total = Received()
    for result in results:
        total.add(result)
    total_s = total.last_at - total.first_at
    return Flow(
        door=workload.door,
        num_streams=workload.batch_size,
        steps_per_s=workload.steps_per_s,
        tokens_per_s=total.num_tokens / total_s,
        tokens_per_message=total.num_tokens / total.num_messages,
        cpu_share={name: each / total_s for name, each in cpu_s.items()},
        cpu_s_per_million={name: each / total.num_tokens * 1e6 for name, each in cpu_s.items()},
        added_ms=percentiles_ms(total.added_s),
        gap_ms=percentiles_ms(total.gaps_s),
    )


def percentiles_ms(values_s: Sequence[float]) -> tuple[float, float]:
    """Return median and 99th percentile; zeros of nothing."""
    if not values_s:
        return 0.0, 0.0
    cuts = quantiles(values_s, n=100, method="inclusive")
    return cuts[49] * 1000, cuts[98] * 1000


def run_flows(bench: Bench, num_streams: int, num_tokens: int, load: float) -> list[Flow]:
    """Measure the way to each door as fast as it goes, then those to the services at a part of the last rate."""
    doors: tuple[Door, ...] = ("engine", "detokenizer", "router")
    flows = [bench.run(bench.workload(door, num_streams, num_tokens)) for door in doors]
    steps_per_s = max(1, round(load * flows[-1].tokens_per_s / num_streams))
    paced: list[tuple[Door, int]] = [("router", num_streams), ("detokenizer", num_streams)]
    paced += [("router", max(1, num_streams // 10))]
    return flows + [bench.run(bench.workload(*each, PACED_S * steps_per_s, steps_per_s)) for each in paced]


@dataclass(frozen=True)
class SlowReader:
    """What a slow reader does to the services and to readers that keep up."""

    num_quick_streams: int
    quick_p99_gap_ms: float
    """Without the slow one."""
    beside_p99_gap_ms: float
    """Beside it."""
    p99_gap_ratio: float
    rss_growth_mib: dict[str, float]
    """By service, while the slow one was there."""
    num_parked: int
    """Requests parked in the engine in the end."""


def run_slow_reader(bench: Bench, steps_per_s: int, duration_s: int) -> SlowReader:
    """Measure streams that keep up, first alone, then beside one more whose reader does not."""
    quick = bench.workload("router", NUM_QUICK_STREAMS, steps_per_s * duration_s, steps_per_s)
    alone = bench.run(quick)
    before = {name: bench.services.rss_bytes(name) for name in ("detokenizer", "router")}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as slow_process:
        batch = replace(quick, batch_size=NUM_QUICK_STREAMS + 1)
        slow = slow_process.submit(run_slow_client, batch, SLOW_INTERVAL_S, duration_s + SLOW_OVERTIME_S)
        beside = bench.run(batch)
        after = {name: bench.services.rss_bytes(name) for name in before}
        num_parked = _num_parked(bench.services)
        slow.result()
    return SlowReader(
        num_quick_streams=NUM_QUICK_STREAMS,
        quick_p99_gap_ms=alone.gap_ms[1],
        beside_p99_gap_ms=beside.gap_ms[1],
        p99_gap_ratio=beside.gap_ms[1] / alone.gap_ms[1],
        rss_growth_mib={name: (after[name] - before[name]) / 2**20 for name in before},
        num_parked=num_parked,
    )


def _num_parked(services: Services) -> int:
    with grpc.insecure_channel(services.address("detokenizer")) as channel:
        info = ReplicaServiceStub(channel).GetReplicaInfo(replica_pb2.GetReplicaInfoRequest())
    return int(info.load.num_parked)


@contextmanager
def set_up(tokenizer: Tokenizer) -> Iterator[Bench]:
    """Start the services and the processes of clients."""
    spawn = multiprocessing.get_context("spawn")
    with running(tokenizer) as services, ProcessPoolExecutor(NUM_CLIENT_PROCESSES, mp_context=spawn) as pool:
        yield Bench(services, pool)


def print_tables(flows: Sequence[Flow], title: str) -> None:
    table = _table(title, "streams", "steps/s", "tokens/s", "tokens/\nmessage", "added, ms\np50 / p99", "busiest")
    for flow in flows:
        table.add_row(
            f"{flow.door}, {flow.num_streams}",
            f"{flow.steps_per_s:,}" if flow.steps_per_s else "all",
            f"{flow.tokens_per_s:,.0f}",
            f"{flow.tokens_per_message:.1f}",
            " / ".join(f"{ms:.1f}" for ms in flow.added_ms) if flow.steps_per_s else "",
            f"{flow.limit} {flow.cpu_share[flow.limit]:.0%}",
        )
    names = [name for name in flows[-1].cpu_share if not name.startswith("clients")]
    costs = _table("CPU seconds for a million tokens", "streams", "steps/s", *names)
    for flow in flows:
        spent = (f"{flow.cpu_s_per_million[name]:.1f}" if name in flow.cpu_share else "" for name in names)
        pace = f"{flow.steps_per_s:,}" if flow.steps_per_s else "all"
        costs.add_row(f"{flow.door}, {flow.num_streams}", pace, *spent)
    console = Console()
    console.print(table)
    console.print(costs)


def print_slow_reader(measured: SlowReader, machine: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"machine": machine, **asdict(measured)}))
        return
    print(f"{measured.num_quick_streams} streams that keep up, and one that does not, on {machine}")
    print(f"p99 of their gaps: {measured.quick_p99_gap_ms:.1f} ms, beside it {measured.p99_gap_ratio:.2f} times that")
    grown = ", ".join(f"{name} {mib:.1f} MiB" for name, mib in measured.rss_growth_mib.items())
    print(f"memory grown beside it: {grown}; requests parked in the end: {measured.num_parked}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def to_json(flows: Sequence[Flow], ratio: float) -> dict[str, Any]:
    engine, detokenizer, router, paced = flows[:4]
    return {
        "engine_tok_s": engine.tokens_per_s,
        "detokenizer_tok_s": detokenizer.tokens_per_s,
        "detokenizer_tok_s_per_core": detokenizer.tokens_per_core("detokenizer"),
        "router_tok_s": router.tokens_per_s,
        "router_tok_s_per_core": router.tokens_per_core("router"),
        "added_ms_p50": paced.added_ms[0],
        "added_ms_p99": paced.added_ms[1],
        "linear_ratio": ratio,
        "flows": [{**asdict(flow), "limit": flow.limit} for flow in flows],
    }


@click.command()
@click.option("--streams", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--tokens", type=click.IntRange(min=2), default=2000, show_default=True, help="Of each stream.")
@click.option("--load", type=click.FloatRange(0, 1), default=0.1, show_default=True, help="Part of the greatest rate.")
@click.option("--slow-reader", is_flag=True, help="Measure what a slow reader does to others instead.")
@click.option("--steps-per-s", type=click.IntRange(min=1), default=200, show_default=True, help="With --slow-reader.")
@click.option("--duration-s", type=click.IntRange(min=2), default=20, show_default=True, help="With --slow-reader.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of a table.")
def main(
    streams: int, tokens: int, load: float, slow_reader: bool, steps_per_s: int, duration_s: int, as_json: bool
) -> None:
    """Measure streams from a synthetic engine through detokenizer and router."""
    tokenizer = load_tokenizer(find_model("smollm2", weights=False))
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    with set_up(tokenizer) as bench:
        if slow_reader:
            print_slow_reader(run_slow_reader(bench, steps_per_s, duration_s), machine, as_json=as_json)
            return
        flows = run_flows(bench, streams, tokens, load)
    results = to_json(flows, linear_ratio(tokenizer))
    if as_json:
        print(json.dumps({"machine": machine, **results}))
        return
    print_tables(flows, f"Streams from where, and how many, on {machine}")
    for name in ("detokenizer_tok_s_per_core", "router_tok_s_per_core", "linear_ratio"):
        print(f"{name}: {results[name]:,.2f}")


if __name__ == "__main__":
    main()
