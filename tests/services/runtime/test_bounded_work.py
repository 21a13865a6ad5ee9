"""Processes that work for others: what becomes of them, and of who waits, when something ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvern.services.runtime import bounded_work
from kvern.services.runtime.bounded_work import BoundedWork
from kvern.services.runtime.errors import Unavailable

MODULE = "kvern.services.engine.grammar_process"
SETUP = b'{"added_tokens": [], "vocab_size": 256}'
JOB = {"kind": "regex", "text": "a+"}
PATIENCE_S = 30

_OWNER = f"""
import time
from kvern.services.runtime.bounded_work import BoundedWork
work = BoundedWork("{MODULE}", {SETUP!r})
assert work.ask({JOB}) == {{}}
print("ready", flush=True)
time.sleep(600)
"""


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _wait_for_end(pidfds: list[int]) -> None:
    for pidfd in pidfds:
        ended, _, _ = select.select([pidfd], [], [], PATIENCE_S)
        assert ended
        os.close(pidfd)


def test_process_that_ended_while_it_had_nothing_to_do_costs_the_next_job_nothing() -> None:
    work = BoundedWork(MODULE, SETUP)
    assert work.ask(JOB) == {}
    forks = bounded_work._forks_of(MODULE, SETUP).process
    assert forks is not None
    children = _children(forks.pid)
    pidfds = list(map(os.pidfd_open, children))
    for child in children:
        os.kill(child, signal.SIGKILL)
    _wait_for_end(pidfds)
    assert work.ask(JOB) == {}


def test_process_that_cannot_be_started_is_not_the_jobs_fault() -> None:
    with pytest.raises(Unavailable, match="no process could be started"):
        BoundedWork("kvern.services.runtime.no_module").ask(JOB)


def test_processes_end_with_the_one_they_work_for_however_that_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        [forks] = _children(owner.pid)
        pidfds = list(map(os.pidfd_open, [forks, *_children(forks)]))
        assert len(pidfds) == 2
        owner.kill()
    _wait_for_end(pidfds)
