"""Many replicas behind one router, simulated: what each policy of choice makes of hit rate, latency and balance.

    python bench/fleet.py TRACE [--policy all] [--json] [--plot FILE]
    python bench/fleet.py --tenants 50 --requests 2000

Scheduler, block pool, digests and choice are the real ones, under a virtual clock; how long a step takes is a stated
model's word. TRACE is a file of JSON lines with `timestamp` (ms), `input_length`, `output_length` (tokens) and
`hash_ids` (one for 512 tokens), such as the public Mooncake traces (https://github.com/kvcache-ai/Mooncake,
Apache-2.0). Without one, synthetic tenants ask.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from fleet_cost import H100, fit_this_machine
from fleet_plot import draw
from fleet_simulation import Fleet, FleetConfig, Outcome, pooled_hit_rate
from fleet_workload import Arrival, read_trace, tenant_requests
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvern.services.router.choice import Policy

COSTS = {"h100": lambda: H100, "this-machine": fit_this_machine}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of the same requests under several policies."""

    replicas: int
    requests: int
    policies: Mapping[str, Outcome]
    pooled_hit_rate: float
    """Of one cache as large as all replicas' together."""


def compare(config: FleetConfig, policies: Sequence[Policy], arrivals: Sequence[Arrival]) -> Comparison:
    """Serve all requests under each policy."""
    columns = (TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def bar(description: str) -> Callable[[], None]:
            task = progress.add_task(description, total=len(arrivals))
            return lambda: progress.advance(task)

        pooled = pooled_hit_rate(config, arrivals, bar("one cache"))
        outcomes = {str(policy): Fleet(config, policy, arrivals).run(bar(policy)) for policy in policies}
    return Comparison(config.num_replicas, len(arrivals), outcomes, pooled)


def print_table(comparison: Comparison) -> None:
    title = f"{comparison.requests:,} requests, {comparison.replicas:,} replicas"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("hit rate", "first token, s\np50 / p90", "inter-token, s\np99", "load,\nmax / mean", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, outcome in comparison.policies.items():
        table.add_row(
            name,
            f"{outcome.hit_rate:.1%}",
            f"{outcome.ttft_p50_s:.2f} / {outcome.ttft_p90_s:.2f}",
            f"{outcome.itl_p99_s:.3f}",
            f"{outcome.imbalance:.2f}",
            f"{outcome.busy:.0%}",
        )
    table.add_row("one cache", f"{comparison.pooled_hit_rate:.1%}")
    Console().print(table)


def check_fit(arrivals: Sequence[Arrival], kv_tokens: int) -> None:
    """Raise UsageError if a request could never run."""
    longest = max(arrival.input_length + arrival.output_length for arrival in arrivals)
    if longest > kv_tokens:
        raise click.UsageError(f"--kv-tokens {kv_tokens}: the longest request takes {longest}")


@click.command(help=__doc__)
@click.argument("trace", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--tenants", default=50, show_default=True, type=click.IntRange(min=1), help="Without a trace.")
@click.option(
    "--rate",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Of the tenants' requests, a second.",
)
@click.option("--requests", type=click.IntRange(min=1), help="How many. [default: all of a trace, 2000 of tenants]")
@click.option(
    "--speed",
    default=4.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="How many times as fast as they came a trace's requests come.",
)
@click.option("--replicas", default=16, show_default=True, type=click.IntRange(1, 10_000))
@click.option(
    "--policy", default="all", show_default=True, type=click.Choice(["all", *(policy.value for policy in Policy)])
)
@click.option("--cost", default="h100", show_default=True, type=click.Choice(list(COSTS)), help="What steps cost.")
@click.option("--block-size", default=512, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--kv-tokens", default=430_080, show_default=True, type=click.IntRange(min=1), help="Room for KV at a replica."
)
@click.option("--max-num-seqs", default=256, show_default=True, type=click.IntRange(min=1))
@click.option("--max-num-batched-tokens", default=2048, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--index-lag-ms",
    default=50.0,
    show_default=True,
    type=click.FloatRange(0),
    help="How late the router learns of blocks.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the comparison into a PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of a table.")
def main(
    trace: Path | None,
    tenants: int,
    rate: float,
    requests: int | None,
    speed: float,
    replicas: int,
    policy: str,
    cost: str,
    block_size: int,
    kv_tokens: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    index_lag_ms: float,
    seed: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    if trace is not None:
        arrivals = read_trace(trace, requests, speed)
    else:
        arrivals = tenant_requests(tenants, requests or 2000, rate, seed)
    check_fit(arrivals, kv_tokens)
    config = FleetConfig(
        num_replicas=replicas,
        cost=COSTS[cost](),
        block_size=block_size,
        num_blocks=kv_tokens // block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        index_lag_s=index_lag_ms / 1000,
        seed=seed,
    )
    comparison = compare(config, list(Policy) if policy == "all" else [Policy(policy)], arrivals)
    if plot is not None:
        draw(comparison.policies, comparison.pooled_hit_rate, plot)
    if as_json:
        print(json.dumps(asdict(comparison)))
    else:
        print_table(comparison)


if __name__ == "__main__":
    main()
