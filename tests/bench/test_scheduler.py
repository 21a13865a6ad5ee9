"""The benchmark of the scheduler alone: its requests are what it says they are."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from scheduler import BLOCK_SIZE, Decodes

BENCH = Path(__file__).parents[2] / "bench" / "scheduler.py"
NUM_RUNNING = 8


def blocks_begun(*, aligned: bool) -> list[int]:
    """Return how many blocks the requests began in each of 32 steps."""
    decodes = Decodes(NUM_RUNNING, 2 * BLOCK_SIZE, aligned=aligned)
    num_used = [decodes.num_used_blocks]
    for _ in range(2 * BLOCK_SIZE):
        decodes.step()
        num_used.append(decodes.num_used_blocks)
    return [after - before for before, after in pairwise(num_used)]


def test_each_request_begins_a_block_every_sixteenth_step() -> None:
    begun = blocks_begun(aligned=False)
    assert begun[:BLOCK_SIZE] == begun[BLOCK_SIZE:]
    assert sum(begun) == 2 * NUM_RUNNING
    assert max(begun) < NUM_RUNNING


def test_aligned_requests_begin_their_blocks_together() -> None:
    assert sorted(blocks_begun(aligned=True))[-3:] == [0, NUM_RUNNING, NUM_RUNNING]


def test_json_line_tells_microseconds_of_a_step() -> None:
    command = [sys.executable, BENCH, "--running", "4", "--steps", "16", "--json"]
    printed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert printed["running"] == 4
    assert 0 < printed["us_per_step_p50"] <= printed["us_per_step_p99"]
