"""How fast a server answers, whoever's it is: the same work for Kvern's gRPC and for any OpenAI-compatible HTTP API.

    python bench/serve.py grpc://127.0.0.1:50051 [--workload c16] [--json]
    python bench/serve.py http://127.0.0.1:8000

c1, c16, c64: prompts of 32 tokens, answers of 128, as many at a time. prefix: 8 groups of 8 prompts that share 1,000
tokens, with 48 of their own, answers of 32, 8 at a time. mixed: 8 streams of 256 tokens, and three times, every two
seconds, a prompt of 4,000. Before each workload a request or two of its kind are answered and not counted.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from serve_targets import Answer, TargetFailed, open_target
from serve_workloads import WORKLOADS, Answers, Workload

from kvern.services.runtime.event_loop import EventLoop


@dataclass(frozen=True)
class Measured:
    """What a workload took. Times in seconds; those of long prompts are None where there were none."""

    workload: str
    tok_s: float
    """Output tokens a second of the streams, from the first request sent to the last token."""
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    long_ttft_p50: float | None
    tokens_per_chunk: float
    client_us_per_token: float
    """CPU time of this process for a token that came."""
    num_tokens: int
    """That came, long prompts' among them."""


def measure(url: str, name: str, seed: float, workload: Workload | None = None) -> Measured:
    """Send a workload to a server. Equal seeds send the same ids. Raises TargetFailed."""
    workload = workload or WORKLOADS[name]
    rng = random.Random(f"{name} {seed}")
    warm_up, requests = workload.warm_up(rng), workload.requests(rng)

    async def run() -> tuple[Answers, float]:
        async with open_target(url) as target:
            for request in warm_up:
                await target.answer(request)
            start_s = time.process_time()
            answers = await workload.run(target, requests)
            return answers, time.process_time() - start_s

    answers, client_s = _run(run())
    return summarize(name, answers, client_s)


def _run(main: Coroutine[Any, Any, tuple[Answers, float]]) -> tuple[Answers, float]:
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(main)


def summarize(name: str, answers: Answers, client_s: float) -> Measured:
    streams, every = answers.streams, [*answers.streams, *answers.long]
    total_s = max(each.arrivals[-1].at for each in streams) - min(each.sent_at for each in streams)
    first, gaps = [each.first_token_s for each in streams], [gap for each in streams for gap in each.gaps_s]
    return Measured(
        workload=name,
        tok_s=_num_tokens(streams) / total_s,
        ttft_p50=percentile(first, 50),
        ttft_p99=percentile(first, 99),
        itl_p50=percentile(gaps, 50),
        itl_p99=percentile(gaps, 99),
        long_ttft_p50=percentile([each.first_token_s for each in answers.long], 50) if answers.long else None,
        tokens_per_chunk=_num_tokens(every) / sum(len(each.arrivals) for each in every),
        client_us_per_token=client_s / _num_tokens(every) * 1e6,
        num_tokens=_num_tokens(every),
    )


def _num_tokens(answers: Sequence[Answer]) -> int:
    return sum(answer.num_tokens for answer in answers)


def percentile(values: Sequence[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def print_table(results: Sequence[Measured], title: str) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("workload", no_wrap=True)
    for column in ("tokens/s", "first token, ms\np50 / p99", "gaps, ms\np50 / p99", "long prompt's\nfirst token, ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in results:
        table.add_row(
            each.workload,
            f"{each.tok_s:,.1f}",
            f"{each.ttft_p50 * 1000:,.0f} / {each.ttft_p99 * 1000:,.0f}",
            f"{each.itl_p50 * 1000:,.1f} / {each.itl_p99 * 1000:,.1f}",
            "" if each.long_ttft_p50 is None else f"{each.long_ttft_p50 * 1000:,.0f}",
        )
    Console().print(table)


@click.command()
@click.argument("target")
@click.option("--workload", type=click.Choice([*WORKLOADS, "all"]), default="all", show_default=True)
@click.option("--seed", type=int, help="Of the prompts. Default: another each time, so that none is cached.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line a workload instead of a table.")
def main(target: str, workload: str, seed: int | None, as_json: bool) -> None:
    """Measure TARGET, grpc://HOST:PORT or http://HOST:PORT."""
    seed = time.time_ns() if seed is None else seed
    results = []
    for name in WORKLOADS if workload == "all" else [workload]:
        click.echo(f"measuring: {name}", err=True)
        try:
            results.append(measure(target, name, seed))
        except (TargetFailed, OSError) as error:
            raise click.ClickException(f"{target}: {error}") from error
        if as_json:
            print(json.dumps(asdict(results[-1])), flush=True)
    if not as_json:
        print_table(results, target)


if __name__ == "__main__":
    main()
