"""The benchmark of what services pay tells processes apart, and their time."""

from __future__ import annotations

import subprocess
import sys

import pytest
from services_cpu import cpu_s_of_services

CHILD = (
    "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint(flush=True); input()"
)
PARENT = """
import subprocess, sys
child = [sys.executable, "-c", sys.argv[1]]
subprocess.Popen([*child, "kvern.services.router", "a b"])
subprocess.Popen([*child, "something", "else"])
input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="times are those of /proc")
def test_services_are_told_by_name_with_their_time() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for _ in range(2):
            parent.stdout.readline()
        [(name, cpu_s)] = cpu_s_of_services(parent.pid).items()
        parent.stdin.write(b"\n\n\n")
        parent.stdin.close()
    assert name == "router"
    assert 0.29 <= cpu_s < 5
