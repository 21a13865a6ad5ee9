"""Every Triton kernel compiles for every GPU that Kvern supports, and keeps to registers and shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not made for this platform")


def test_kernels_compiled_for_all_architectures_neither_spill_nor_use_the_stack(tmp_path: Path) -> None:
    """In a process of its own: one that interprets kernels cannot compile them."""
    table = tmp_path / "resources.json"
    command = [sys.executable, "-m", "tests.kernels.triton.compile_all", "--json", str(table)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    completed = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    print(completed.stdout)
    assert {each["arch"] for each in json.loads(table.read_text())} == {80, 90, 100}
