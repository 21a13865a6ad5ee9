"""What the host does for a step beside running the model: schedule and commit, with made-up tokens.

    python bench/scheduler.py [--running N] [--aligned] [--json]

N requests decode together, each with a prompt of its own of 512 to 527 tokens. So some of them begin a block in each
step, and as many complete one, which is hashed and registered. With --aligned all prompts have 512 tokens: all blocks
begin and end in the same steps, every sixteenth.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from dataclasses import asdict, dataclass

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from kvern.engine.block_pool import BlockPool
from kvern.engine.plan import SampledTokens
from kvern.engine.request import Request, SamplingParams, StoppingParams
from kvern.engine.scheduler import Scheduler, SchedulerConfig

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 512
VOCAB_SIZE = 49_152
NUM_WARM_UP_STEPS = 2 * BLOCK_SIZE
SWITCH_INTERVAL_S = 1e-4


@dataclass(frozen=True)
class Cost:
    """Microseconds of a step, over `steps` of them."""

    running: int
    steps: int
    us_per_step_p50: float
    """Schedule and commit together."""
    us_per_step_p99: float
    us_schedule_p50: float
    us_commit_p50: float


class Decodes:
    """A scheduler all of whose requests generate, and do not end."""

    def __init__(self, num_running: int, num_steps: int, *, aligned: bool) -> None:
        self._random = random.Random(0)
        max_model_len = NUM_PROMPT_TOKENS + BLOCK_SIZE + NUM_WARM_UP_STEPS + num_steps + 2
        self._pool = BlockPool(num_running * -(-max_model_len // BLOCK_SIZE), record_events=True)
        config = SchedulerConfig(
            block_size=BLOCK_SIZE,
            max_num_seqs=num_running,
            max_num_batched_tokens=num_running * max_model_len,  # all prompts in one step, which leaves them aligned
            max_model_len=max_model_len,
            eos_token_ids=frozenset({VOCAB_SIZE}),
            contract="bench",
        )
        self._scheduler = Scheduler(self._pool, config)
        for number in range(num_running):
            num_tokens = NUM_PROMPT_TOKENS + (0 if aligned else self._random.randrange(BLOCK_SIZE))
            self._scheduler.add(self._request(number, num_tokens, max_model_len - num_tokens))
        for _ in range(NUM_WARM_UP_STEPS):
            self.step()

    @property
    def num_used_blocks(self) -> int:
        return self._pool.num_used

    def step(self) -> tuple[int, int]:
        """Return the nanoseconds that `schedule` and `commit` took."""
        started_ns = time.perf_counter_ns()
        plan = self._scheduler.schedule()
        scheduled_ns = time.perf_counter_ns()
        sampled = SampledTokens([self._random.randrange(VOCAB_SIZE) for _ in plan.entries])
        sampled_ns = time.perf_counter_ns()
        self._scheduler.commit(plan, sampled)
        self._pool.take_events()
        return scheduled_ns - started_ns, time.perf_counter_ns() - sampled_ns

    def _request(self, number: int, num_tokens: int, max_tokens: int) -> Request:
        prompt = self._random.choices(range(VOCAB_SIZE), k=num_tokens)
        return Request(number, prompt, num_tokens, SamplingParams(), StoppingParams(max_tokens), arrival=number)


def measure(num_running: int, num_steps: int, *, aligned: bool) -> Cost:
    decodes = Decodes(num_running, num_steps, aligned=aligned)
    schedule_us, commit_us = np.array([decodes.step() for _ in range(num_steps)]).T / 1000
    step_us = schedule_us + commit_us
    return Cost(
        running=num_running,
        steps=num_steps,
        us_per_step_p50=float(np.percentile(step_us, 50)),
        us_per_step_p99=float(np.percentile(step_us, 99)),
        us_schedule_p50=float(np.percentile(schedule_us, 50)),
        us_commit_p50=float(np.percentile(commit_us, 50)),
    )


@click.command(help=__doc__)
@click.option("--running", "runnings", multiple=True, type=click.IntRange(min=1), default=(16, 256, 1024))
@click.option("--steps", default=640, show_default=True, type=click.IntRange(min=1))
@click.option("--aligned", is_flag=True, help="Let all requests begin their blocks in the same steps.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line for each N instead of a table.")
def main(runnings: tuple[int, ...], steps: int, aligned: bool, as_json: bool) -> None:
    # As in the engine's process: a collection does not walk what was imported, and threads take turns often.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    costs = [measure(running, steps, aligned=aligned) for running in runnings]
    if as_json:
        for cost in costs:
            print(json.dumps(asdict(cost)))
        return
    table = Table("running", "step p50, µs", "step p99, µs", "schedule p50, µs", "commit p50, µs")
    for cost in costs:
        figures = cost.us_per_step_p50, cost.us_per_step_p99, cost.us_schedule_p50, cost.us_commit_p50
        table.add_row(f"{cost.running:,}", *(f"{us:,.0f}" for us in figures))
    Console().print(table)


if __name__ == "__main__":
    main()
