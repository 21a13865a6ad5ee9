"""Every Triton kernel equals its plain reference, under the interpreter. A process a file, one a core at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not made for this platform")

FILES = sorted((Path(__file__).parent / "triton").glob("test_*.py"))
Runs = dict[Path, "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {file: pool.submit(interpret, file) for file in FILES}


def interpret(file: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", str(file)]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem.removeprefix("test_"))
def test_kernels_under_the_interpreter_equal_their_references(file: Path, runs: Runs) -> None:
    completed = runs[file].result()
    assert completed.returncode == 0, completed.stdout + completed.stderr
