"""What Kvern does on this machine's GPU: whether it is right, and how fast it is.

    python3 bench/gpu_check.py [--tune] [--stages NAME ...] [--json FILE]

Needs Python, torch and triton, and nothing that is installed of Kvern. Each stage has a deadline, five and a half
minutes together. After each the report is written anew. The exit status is 0 where all is right, 1 where something is
wrong, 2 where the check cannot run here, 3 where nothing is wrong and a stage was late. What is slow is not wrong: the
table at the end has each figure beside its aim.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_check_finding import StageReport, Status, format_table, write_report
from gpu_check_stage import Stage, run_stage

STAGES = (
    Stage("ceilings", "gpu_check_kernels:measure_ceilings", 20),
    Stage("compile", "gpu_check_kernels:compile_cases", 60),
    Stage("references", "gpu_check_kernels:compare_with_references", 80),
    Stage("engine", "gpu_check_engine:compare_engines", 40),
    Stage("kernels", "gpu_check_rates:measure_kernels", 70),
    Stage("steps", "gpu_check_steps:measure_steps", 60),
)
TUNING = Stage("tuning", "gpu_check_tuning:tune", 240)

_OLDEST = {"torch": (2, 11), "triton": (3, 6)}
_OLDEST_CAPABILITY = (8, 0)


def why_not() -> str | None:
    """Return one sentence on what this machine lacks, or None. Loads torch, so that no stage pays for a cold disk."""
    for name, oldest in _OLDEST.items():
        try:
            version = __import__(name).__version__
        except ModuleNotFoundError:
            return f"This needs {name}, which is not installed for {sys.executable}."
        if tuple(map(int, version.split(".")[:2])) < oldest:
            return f"This needs {name} {'.'.join(map(str, oldest))} or newer, and {version} is installed."
    import torch

    if not torch.cuda.is_available():
        return "This needs a GPU that torch can use, and there is none."
    capability = torch.cuda.get_device_capability()
    if capability < _OLDEST_CAPABILITY:
        return (
            f"This needs a GPU of compute capability 8.0 or newer, and this one's is {capability[0]}.{capability[1]}."
        )
    return None


def run_stages(stages: Sequence[Stage], device: str, report: Path) -> list[StageReport]:
    """Run stages one after another, and rewrite the report after each."""
    done: list[StageReport] = []
    write_report(report, done)
    for stage in stages:
        print(f"{stage.name} (up to {stage.deadline_s:.0f} s) ...", flush=True)
        done.append(run_stage(stage, device, report))
        write_report(report, done)
    return done


def exit_status(stages: Sequence[StageReport]) -> int:
    if any(stage.is_wrong for stage in stages):
        return 1
    return 3 if any(stage.status is Status.LATE for stage in stages) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    names = [stage.name for stage in STAGES[1:]]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="where the report goes")
    parser.add_argument("--stages", nargs="+", choices=names, default=names, help="run these only, after the ceilings")
    parser.add_argument("--tune", action="store_true", help="then look for faster tilings, and write them down")
    options = parser.parse_args(arguments)
    if (reason := why_not()) is not None:
        print(reason, file=sys.stderr)
        return 2
    chosen = [STAGES[0], *(stage for stage in STAGES if stage.name in options.stages)]
    done = run_stages([*chosen, TUNING] if options.tune else chosen, "cuda", options.json)
    print(format_table(done))
    print(f"The report is in {options.json}.")
    for stage in done:
        if stage.status is not Status.DONE:
            print(
                f"The stage {stage.name} {'was stopped at its deadline' if stage.status is Status.LATE else 'failed'}."
            )
    return exit_status(done)


if __name__ == "__main__":
    sys.exit(main())
