"""How much of the KV memory that requests hold is empty: the real scheduler and block pool on a trace's lengths.

    python bench/kv_waste.py TRACE [--json]

TRACE is a file of JSON lines with `input_length` and `output_length`, in tokens, such as the public Mooncake traces
(https://github.com/kvcache-ai/Mooncake, Apache-2.0). No model runs: steps follow each other, all requests are there
from the start, and none shares a prefix, which would hide waste.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from kvern.engine.block_pool import BlockPool
from kvern.engine.plan import Plan, SampledTokens
from kvern.engine.request import CacheParams, Request, SamplingParams, StoppingParams
from kvern.engine.scheduler import Scheduler, SchedulerConfig

MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 8192
POOL_TOKENS = 1_000_000


@dataclass(frozen=True)
class Waste:
    """Slots are counted after each step and summed over all steps."""

    requests: int
    block_size: int
    steps: int
    preemptions: int
    unused_fraction: float
    """Share of allocated token slots that hold no KV: ends of blocks, and prompts not computed yet."""
    block_end_fraction: float
    """The part of it that no token known so far will fill."""


class Lengths:
    """Runs a scheduler without a model."""

    def __init__(self, lengths: list[tuple[int, int]], block_size: int) -> None:
        self._block_size = block_size
        self._pool = BlockPool(POOL_TOKENS // block_size)
        config = SchedulerConfig(
            block_size=block_size,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=max(map(sum, lengths)),
            eos_token_ids=frozenset(),
            contract="",
        )
        self._scheduler = Scheduler(self._pool, config)
        self._requests = [_request(number, *each) for number, each in enumerate(lengths)]
        for request in self._requests:
            self._scheduler.add(request)

    def measure(self) -> Waste:
        """Run all requests to their end."""
        steps = allocated = known = computed = 0
        while self._scheduler.has_work:
            self._step(self._scheduler.schedule())
            steps += 1
            allocated += self._pool.num_used * self._block_size
            holders = [request for request in self._requests if request.block_ids]
            known += sum(request.num_tokens for request in holders)
            computed += sum(request.num_computed_tokens for request in holders)
        return Waste(
            requests=len(self._requests),
            block_size=self._block_size,
            steps=steps,
            preemptions=sum(request.num_preemptions for request in self._requests),
            unused_fraction=1 - computed / allocated,
            block_end_fraction=max(0.0, 1 - known / allocated),
        )

    def _step(self, plan: Plan) -> None:
        self._scheduler.commit(plan, SampledTokens([0 if entry.samples else None for entry in plan.entries]))


def _request(number: int, input_length: int, output_length: int) -> Request:
    return Request(
        request_id=number,
        token_ids=[0] * input_length,
        num_prompt_tokens=input_length,
        sampling=SamplingParams(),
        stopping=StoppingParams(max_tokens=max(1, output_length)),
        cache=CacheParams(bypass=True),
        arrival=number,
    )


def read_lengths(trace: Path, count: int) -> list[tuple[int, int]]:
    """Return (input, output) tokens of the first `count` requests of a trace."""
    with trace.open() as lines:
        items = [json.loads(line) for line in islice(lines, count)]
    return [(item["input_length"], item["output_length"]) for item in items]


@click.command(help=__doc__)
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--requests", default=500, show_default=True, type=click.IntRange(min=1))
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of a table.")
def main(trace: Path, requests: int, block_size: int, as_json: bool) -> None:
    waste = Lengths(read_lengths(trace, requests), block_size).measure()
    if as_json:
        print(json.dumps(asdict(waste)))
        return
    table = Table("requests", "block size", "steps", "preemptions", "slots unused", "of these, ends of blocks")
    table.add_row(
        str(waste.requests),
        str(waste.block_size),
        f"{waste.steps:,}",
        str(waste.preemptions),
        f"{waste.unused_fraction:.2%}",
        f"{waste.block_end_fraction:.2%}",
    )
    Console().print(table)


if __name__ == "__main__":
    main()
