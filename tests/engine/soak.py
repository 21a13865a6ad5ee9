"""The scheduler machine for as long as one likes: `python -m tests.engine.soak --steps 1000000`.

Half of the steps run at depth 0, half at depth 1; every invariant is checked after every one.
"""

from __future__ import annotations

import argparse
import time

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from rich.progress import Progress

from .test_scheduler_machine import SETTINGS, DeeperMachine, SchedulerMachine

_EXAMPLES_AT_A_TIME = 500


def soak(machine: type[SchedulerMachine], num_steps: int, progress: Progress) -> int:
    """Run a machine for at least so many engine steps, with fresh random examples. Return how many."""
    done = 0

    class Counted(machine):  # type: ignore[misc,valid-type]
        def teardown(self) -> None:
            nonlocal done
            super().teardown()
            done += self.engine.num_steps
            progress.update(task, completed=min(done, num_steps))

    task = progress.add_task(f"depth {machine.depth}", total=num_steps)
    while done < num_steps:
        run_state_machine_as_test(Counted, settings=settings(SETTINGS, max_examples=_EXAMPLES_AT_A_TIME, database=None))
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    num_steps = parser.parse_args().steps // 2
    start_s = time.monotonic()
    with Progress() as progress:
        done = {machine.depth: soak(machine, num_steps, progress) for machine in (SchedulerMachine, DeeperMachine)}
    parts = ", ".join(f"{count:,} steps at depth {depth}" for depth, count in done.items())
    print(f"no failure in {parts}; {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
