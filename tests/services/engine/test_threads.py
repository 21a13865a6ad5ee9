"""The threads that an engine computes with."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import kvern.services.engine
import torch, numba, numba.np.ufunc.omppool
print(*sorted({line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}))
"""


def has_openmp() -> bool:
    try:
        ctypes.CDLL("libgomp.so.1.0.0")
    except OSError:
        return False
    return sys.platform == "linux"


@pytest.mark.skipif(not has_openmp(), reason="numba has no OpenMP of the system's to run on")
def test_torch_and_numba_share_one_pool_of_threads() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 1
