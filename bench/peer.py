"""Kvern beside vLLM, in bfloat16, and beside llama.cpp, in 4 bits, with the same weights: one run, round by round.

    python bench/peer.py [--workload c16] [--rounds 3] [--json] [-- FLAGS OF KVERN UP]

All servers run throughout, but that ours is started anew, with a target for a step's time, for streams beside long
prompts; one at a time has work. Each round sends all of them the same prompts, which no earlier
round had; every second round goes through them backwards. What is shown are medians of the rounds.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click
from peer_servers import kvern, kvern_in_4_bits, llama_cpp, vllm
from peer_setup import SetUpFailed, set_up, versions
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from serve import Measured, measure
from serve_workloads import WORKLOADS

OURS, PEER = "Kvern", "vLLM"

OURS_IN_4_BITS, LLAMA = "Kvern int4", "llama.cpp"
"""The two with weights in 4 bits."""

WORKLOAD_IN_4_BITS = "c1"
"""Their only one: llama.cpp runs one request at a time."""


@dataclass(frozen=True)
class Aim:
    """What a figure of ours should be, as a share of another's."""

    figure: str
    share: float
    at_least: bool = False

    def holds(self, ratio: float) -> bool:
        return ratio >= self.share if self.at_least else ratio <= self.share

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.share:g}"


AIMS = {
    "c1": [Aim("tok_s", 1.4, at_least=True)],
    "c16": [Aim("tok_s", 1.8, at_least=True)],
    "c64": [Aim("tok_s", 2.0, at_least=True)],
    "prefix": [Aim("tok_s", 1.5, at_least=True), Aim("ttft_p50", 0.6)],
    "mixed": [Aim("itl_p99", 0.2), Aim("long_ttft_p50", 1.1)],
}

AIM_IN_4_BITS = Aim("tok_s", 1.0, at_least=True)
"""Beside llama.cpp."""

MIXED_FLAGS = ("--target-step-ms", "400")
"""Of our server where streams run beside long prompts: a fifth of vLLM's gaps, and all that long prompts get in it."""

FIGURES = ("tok_s", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "long_ttft_p50")

Results = dict[str, dict[str, list[Measured]]]
"""By workload, then by server, one a round."""


def compare(servers: dict[str, str], workloads: Sequence[str], rounds: int) -> Results:
    """Measure every server, whose URLs are given by name, on every workload."""
    first_seed = time.time_ns()
    results: Results = {name: {} for name in workloads}
    turns = [
        (name, turn, server) for name in workloads for turn in range(rounds) for server in _order(servers, name, turn)
    ]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(turns))
        for name, turn, server in turns:
            progress.update(bar, description=f"{name}, round {turn + 1}: {server}")
            measured = measure(servers[server], name, first_seed + turn)
            results[name].setdefault(server, []).append(measured)
            progress.advance(bar)
    return results


def _by_flags(workloads: Sequence[str]) -> Iterator[tuple[Sequence[str], list[str]]]:
    """Return which flags our server needs more for which workloads."""
    if others := [name for name in workloads if name != "mixed"]:
        yield (), others
    if "mixed" in workloads:
        yield MIXED_FLAGS, ["mixed"]


def _order(servers: dict[str, str], workload: str, turn: int) -> Iterator[str]:
    names = [name for name in servers if name in (OURS, PEER) or workload == WORKLOAD_IN_4_BITS]
    return reversed(names) if turn % 2 else iter(names)


def medians(rounds: Sequence[Measured]) -> dict[str, float | None]:
    """Return each figure's median over rounds, None where the workload has none."""
    columns = {figure: [getattr(each, figure) for each in rounds] for figure in FIGURES}
    return {figure: None if None in values else median(values) for figure, values in columns.items()}


def machine() -> str:
    model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return f"{model.partition(':')[2].strip()} ({platform.machine()}), {len(os.sched_getaffinity(0))} cores"


def print_table(results: Results) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("workload", "figure"):
        table.add_column(column, no_wrap=True)
    for column in (OURS, PEER, "ratio", "aim"):
        table.add_column(column, justify="right", no_wrap=True)
    for workload, rounds in results.items():
        aims = {aim.figure: aim for aim in AIMS[workload]}
        _add_rows(table, workload, medians(rounds[OURS]), medians(rounds[PEER]), aims)
    Console().print(table)
    in_4_bits = results.get(WORKLOAD_IN_4_BITS, {})
    if LLAMA in in_4_bits:
        table = Table("workload", "figure", OURS_IN_4_BITS, LLAMA, "ratio", "aim", box=box.SIMPLE_HEAD, pad_edge=False)
        ours, peer = medians(in_4_bits[OURS_IN_4_BITS]), medians(in_4_bits[LLAMA])
        _add_rows(table, WORKLOAD_IN_4_BITS, ours, peer, {AIM_IN_4_BITS.figure: AIM_IN_4_BITS})
        Console().print(table)


def _add_rows(
    table: Table,
    workload: str,
    ours: dict[str, float | None],
    peer: dict[str, float | None],
    aims: dict[str, Aim],
) -> None:
    for figure in FIGURES:
        value, other = ours[figure], peer[figure]
        if value is None or other is None:
            continue
        ratio = value / other
        verdict = _verdict(aims.get(figure), ratio)
        table.add_row(workload, figure, _show(figure, value), _show(figure, other), f"{ratio:.2f}", verdict)
        workload = ""


def _verdict(aim: Aim | None, ratio: float) -> str:
    if aim is None:
        return ""
    return f"{aim}" if aim.holds(ratio) else f"{aim} MISSED"


def _show(figure: str, value: float) -> str:
    if figure == "tok_s":
        return f"{value:,.1f}"
    return f"{value * 1000:,.0f} ms" if value >= 0.1 else f"{value * 1000:.1f} ms"


def to_json(results: Results) -> dict[str, object]:
    return {
        "machine": machine(),
        "versions": versions(),
        "medians": {
            workload: {server: medians(each) for server, each in rounds.items()} for workload, rounds in results.items()
        },
        "rounds": {
            workload: {server: [*map(asdict, each)] for server, each in rounds.items()}
            for workload, rounds in results.items()
        },
    }


@click.command()
@click.argument("up_flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--workload", type=click.Choice([*WORKLOADS]), multiple=True, help="May be repeated. Default: all.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of a table.")
def main(up_flags: Sequence[str], workload: Sequence[str], rounds: int, as_json: bool) -> None:
    """Set the peers up, start all servers, compare them. UP_FLAGS, after --, go to kvern up."""
    # Servers would outlive a process that ends at once.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    workloads = workload or [*WORKLOADS]
    try:
        set_up()
    except SetUpFailed as error:
        raise click.ClickException(f"set-up stopped at {error}") from error
    with ExitStack() as stack:
        click.echo("starting the servers", err=True)
        servers = {PEER: stack.enter_context(vllm())}
        if WORKLOAD_IN_4_BITS in workloads:
            servers[OURS_IN_4_BITS] = stack.enter_context(kvern_in_4_bits())
            servers[LLAMA] = stack.enter_context(llama_cpp())
        results: Results = {}
        for flags, names in _by_flags(workloads):
            with kvern([*up_flags, *flags]) as ours:
                results |= compare({OURS: ours} | servers, names, rounds)
    if as_json:
        print(json.dumps(to_json(results)))
        return
    named = ", ".join(f"{name} {version}" for name, version in versions().items())
    print(f"SmolLM2-135M in bfloat16, and the packaged Q4_1 in 4 bits, on {machine()}: {named}")
    print(f"medians of {rounds} rounds; ratio: Kvern to the other")
    print_table(results)


if __name__ == "__main__":
    main()
