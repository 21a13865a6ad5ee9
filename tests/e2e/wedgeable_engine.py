"""The engine service on a device that takes its time and hangs while a file exists.

Arguments: the file, then the service's flags.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

from kvern.engine.plan import Plan
from kvern.engine.runner import ModelRunner
from kvern.engine.submission import StepSubmission

STEP_S = 0.01
"""How long a step takes at least, so that a tiny model's streams last a while."""

_submit = ModelRunner.submit


def _make_wedgeable(wedge: Path) -> None:
    def submit(runner: ModelRunner, plan: Plan) -> StepSubmission:
        time.sleep(STEP_S)
        while wedge.exists():
            time.sleep(STEP_S)
        return _submit(runner, plan)

    ModelRunner.submit = submit


if __name__ == "__main__":
    _make_wedgeable(Path(sys.argv.pop(1)))
    runpy.run_module("kvern.services.engine", run_name="__main__", alter_sys=True)
