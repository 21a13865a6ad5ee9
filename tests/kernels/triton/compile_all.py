"""Compile every Triton kernel for GPUs that need not be there, and tell what the machine code takes.

Each case calls its operation's launcher, so that Triton specializes kernels as in a step: divisibility of strides and
alignment of pointers included. Only the launch itself is left out. Run it as
`python -m tests.kernels.triton.compile_all [--json FILE] [--arch 90 ...] [--only TEXT] [--once]`, with another Triton
first on PYTHONPATH to see what that one makes of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

# Triton reads these when it is imported.
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kvern.kernels.launch_case import LaunchCase, find_cases

ARCHITECTURES = (80, 90, 100)
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
MAX_SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
_PTXAS_LOGS: dict[bytes, str] = {}
"""By machine code, for a process compiles a kernel once whichever cases it appears in."""

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes."""

    kernel: str
    case: str
    arch: int
    dtype: str
    constants: str
    warps: int
    stages: int
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


class StubDriver:
    """A driver of GPUs that are not there, one device for each architecture."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.utils = self

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCHITECTURES[self.device], 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        arch = ARCHITECTURES[device]
        return {"multiprocessor_count": MULTIPROCESSORS[arch], "max_shared_mem": MAX_SHARED_BYTES[arch]}


def compile_case(case: LaunchCase, arch: int, skipped: Container[str] = ()) -> list[Resources]:
    """Call a case's launcher, and return what the kernels it would have launched take. skipped: names of kernels."""
    driver.set_active(StubDriver(ARCHITECTURES.index(arch)))
    compiled: list[tuple[Any, dict[str, str]]] = []
    with recorded_launches(compiled, skipped):
        case.launch(torch.device("cpu"))
    return [measure(case, arch, *each) for each in compiled]


@contextlib.contextmanager
def recorded_launches(compiled: list[tuple[Any, dict[str, str]]], skipped: Container[str]) -> Iterator[None]:
    """Compile where there would be a launch. Gives each kernel with its constants."""
    run, make_cubin = JITFunction.run, CUDABackend.make_cubin

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if self.__name__ in skipped:
            return None
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if all(kernel is not known for known, _ in compiled):
            compiled.append((kernel, {name: str(value) for name, value in options.items() if name.isupper()}))
        return kernel

    def make_logged_cubin(self: Any, *args: Any) -> bytes:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            cubin: bytes = make_cubin(self, *args)
        _PTXAS_LOGS[cubin] = log.getvalue()
        return cubin

    JITFunction.run, CUDABackend.make_cubin = warm_up, make_logged_cubin
    try:
        yield
    finally:
        JITFunction.run, CUDABackend.make_cubin = run, make_cubin


def measure(case: LaunchCase, arch: int, kernel: Any, constants: dict[str, str]) -> Resources:
    ptxas_log = _PTXAS_LOGS[kernel.asm["cubin"]]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.check_output([_TOOLS / "cuobjdump", "-res-usage", file.name], text=True)
    registers, stack = (int(_find(rf"{word}:(\d+)", usage)) for word in ("REG", "STACK"))
    stores, loads = (int(_find(rf"(\d+) bytes spill {word}", ptxas_log)) for word in ("stores", "loads"))
    return Resources(
        kernel=kernel.name,
        case=case.name,
        arch=arch,
        dtype=str(case.dtype).removeprefix("torch."),
        constants=" ".join(f"{name}={value}" for name, value in constants.items()),
        warps=kernel.metadata.num_warps,
        stages=kernel.metadata.num_stages,
        registers=registers,
        shared_bytes=kernel.metadata.shared,
        stack_bytes=stack,
        spill_store_bytes=stores,
        spill_load_bytes=loads,
    )


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"no {pattern} in: {text}")
    return found[1]


Job = tuple[list[str], int]
"""Names of cases, and an architecture."""


def make_jobs(architectures: list[int], only: str, once: bool) -> list[Job]:
    """Return the cases whose "operation: name, type" holds a text, one a job, or where once an operation's in one."""
    names = [name for name in find_cases() if only in name]
    groups = [list(group) for _, group in groupby(names, key=_operation if once else None)]
    return [(group, arch) for group in groups for arch in architectures]


def _operation(name: str) -> str:
    return name.partition(":")[0]


def run_job(once: bool, job: Job) -> list[Resources]:
    """Compile cases for one architecture. once: each kernel in the first of them, and in the first with fp8."""
    names, arch = job
    cases = [case for name, case in find_cases().items() if name in names and arch >= case.min_architecture]
    found: list[Resources] = []
    known: dict[bool, set[str]] = {False: set(), True: set()}
    for case in cases:
        seen = known[case.dtype.itemsize == 1]
        resources = compile_case(case, arch, seen if once else ())
        seen |= {each.kernel for each in resources}
        found += resources
    return found


def use_cache_within(folder: str) -> None:
    """What another process compiled would come without ptxas's log."""
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(dir=folder)


def compile_all(architectures: list[int], only: str = "", once: bool = False) -> list[Resources]:
    """Compile cases, on all cores, into fresh caches. Arguments as in `make_jobs` and `run_job`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("fork").Pool(initializer=use_cache_within, initargs=(folder,)) as pool,
    ):
        found = pool.map(partial(run_job, once), make_jobs(architectures, only, once), chunksize=1)
    return list(dict.fromkeys(each for resources in found for each in resources))


def is_at_fault(each: Resources) -> bool:
    overflow = each.stack_bytes or each.spill_store_bytes or each.spill_load_bytes
    return bool(overflow) or each.shared_bytes > MAX_SHARED_BYTES[each.arch]


def print_table(resources: list[Resources]) -> None:
    names = [field.name for field in fields(Resources)]
    rows = [names, *([str(getattr(each, name)) for name in names] for each in resources)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write the table to")
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--only", default="", help="compile cases whose 'operation: name, type' holds this text")
    parser.add_argument("--once", action="store_true", help="compile each kernel in one case, and in one with fp8")
    arguments = parser.parse_args()
    resources = compile_all(arguments.arch, arguments.only, arguments.once)
    print(f"Triton {triton.__version__}, torch {torch.__version__}")
    print_table(resources)
    for each in filter(is_at_fault, resources):
        print(f"{each.kernel} for {each.arch} spills, uses the stack or takes more shared memory than there is")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(each) for each in resources], indent=1))
    return int(any(map(is_at_fault, resources)))


if __name__ == "__main__":
    sys.exit(main())
