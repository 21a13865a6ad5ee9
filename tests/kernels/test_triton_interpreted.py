"""Every Triton kernel equals its plain reference, under the interpreter.

In two processes, which take about as long: one a file would spend half its time on imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not made for this platform"),
    # Minutes of pure computing where other work has the cores.
    pytest.mark.timeout(1200),
]

FOLDER = Path(__file__).parent / "triton"
LONGEST = FOLDER / "test_paged_attention.py"
SHARES = {"paged attention": [LONGEST], "all others": sorted(set(FOLDER.glob("test_*.py")) - {LONGEST})}
Runs = dict[str, "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with ThreadPoolExecutor(len(SHARES)) as pool:
        yield {name: pool.submit(interpret, files) for name, files in SHARES.items()}


def interpret(files: list[Path]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", *map(str, files)]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("share", SHARES)
def test_kernels_under_the_interpreter_equal_their_references(share: str, runs: Runs) -> None:
    completed = runs[share].result()
    assert completed.returncode == 0, completed.stdout + completed.stderr
