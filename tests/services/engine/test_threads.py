"""The threads that an engine computes with."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import kvern.services.engine
from pathlib import Path
import torch
from kvern.kernels.rms_norm.cpu import rms_norm

torch.set_num_threads(3)
x = torch.randn(64, 4096)
x.exp()
threads = Path("/proc/self/task")
before = set(threads.iterdir())
rms_norm(x.to(torch.bfloat16), x[0].to(torch.bfloat16), 1e-5)
print(len(before), len(set(threads.iterdir()) - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's threads there")
def test_compiled_kernels_run_on_the_threads_of_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, added = map(int, done.stdout.split())
    assert before >= 3
    assert added == 0
