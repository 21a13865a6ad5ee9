"""A stage of `make gpu-check`, in a process of its own, which is killed with all it started at its deadline.

The stage's function is given the device and the figures of earlier stages. What it yields is written down at once, so
that a stage that is stopped keeps what it had found.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_check_finding import Finding, StageReport, Status, read_figures

ROOT = Path(__file__).resolve().parent.parent
_MAX_WORKERS = 14
_ERROR_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the check."""

    name: str
    target: str
    """As "module:function" beside this file: (device, known figures) -> findings."""
    deadline_s: float


def run_stage(stage: Stage, device: str, report: Path) -> StageReport:
    """Run a stage to its end or its deadline. report: a file of `write_report`, of the stages before."""
    result = StageReport(stage.name, stage.deadline_s)
    with tempfile.TemporaryDirectory() as folder:
        findings, errors = Path(folder) / "findings", Path(folder) / "errors"
        findings.touch()
        command = [sys.executable, __file__, stage.target, device, str(report), str(findings)]
        started = time.monotonic()
        with errors.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
            try:
                code = process.wait(stage.deadline_s)
                result.status = Status.FAILED if code else Status.DONE
            except subprocess.TimeoutExpired:
                result.status = Status.LATE
            finally:
                _kill_group(process)
        result.seconds = time.monotonic() - started
        result.findings = list(_read_findings(findings))
        if result.status is Status.FAILED:
            result.error = errors.read_text(errors="replace").strip()[-_ERROR_CHARACTERS:]
    return result


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the stage and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_findings(path: Path) -> Iterator[Finding]:
    """A line without its end was being written when the stage was stopped."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield Finding(**json.loads(line))


def in_workers(work: Callable[[str, str], str], names: Iterable[str], device: str) -> Iterator[Finding]:
    """Call work(name, device) in many processes, and yield what it says is wrong of each name."""
    if device == "cpu":
        yield from (Finding(name, error=work(name, device)) for name in names)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(_MAX_WORKERS, os.cpu_count() or 1), context) as pool:
        futures = {pool.submit(work, name, device): name for name in names}
        for future in as_completed(futures):
            yield Finding(futures[future], error=future.result())


def main(target: str, device: str, report: str, findings: str) -> None:
    """Run a stage's function in this process."""
    module, function = target.split(":")
    run: Callable[[str, dict[str, float]], Iterable[Finding]] = getattr(importlib.import_module(module), function)
    with Path(findings).open("w", buffering=1) as file:
        for finding in run(device, read_figures(Path(report))):
            file.write(json.dumps(asdict(finding)) + "\n")


if __name__ == "__main__":
    # Nothing is installed.
    sys.path.insert(0, str(ROOT / "src"))
    main(*sys.argv[1:])
