"""Every Triton kernel compiles for every GPU that Kvern supports, and keeps to registers and shared memory.

In processes of their own: one that interprets kernels cannot compile them, and none can hold two Tritons.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import oldest_triton
import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not made for this platform"),
    # Minutes of pure computing where other work has the cores.
    pytest.mark.timeout(1200),
]


def compile_kernels(table: Path, *options: str, **environment: str) -> str:
    """Return what is printed. Fails where a kernel spills, uses the stack, or takes too much shared memory."""
    command = [sys.executable, "-m", "tests.kernels.triton.compile_all", "--json", str(table), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    completed = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    print(completed.stdout)
    return completed.stdout


def compiled(table: Path) -> set[tuple[str, int]]:
    """Return the names of kernels, and the architectures they were compiled for."""
    return {(each["kernel"], each["arch"]) for each in json.loads(table.read_text())}


@pytest.fixture(scope="module")
def of_newest(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, int]]:
    """Compile all cases with the environment's own Triton."""
    table = tmp_path_factory.mktemp("newest") / "resources.json"
    compile_kernels(table)
    return compiled(table)


def test_kernels_compiled_for_all_architectures_neither_spill_nor_use_the_stack(
    of_newest: set[tuple[str, int]],
) -> None:
    assert {arch for _, arch in of_newest} == {80, 90, 100}


@pytest.mark.skipif(
    not oldest_triton.is_there(), reason=f"no Triton in {oldest_triton.folder()}: `make oldest-triton` puts it there"
)
def test_the_oldest_triton_compiles_the_same_kernels(of_newest: set[tuple[str, int]], tmp_path: Path) -> None:
    """Each in one case, and in one with fp8."""
    table = tmp_path / "resources.json"
    printed = compile_kernels(table, "--once", PYTHONPATH=str(oldest_triton.folder()))
    assert printed.startswith(f"Triton {oldest_triton.oldest_version()}")
    assert compiled(table) == of_newest
