"""Stages of `make gpu-check`: what the GPU can do, and whether kernels compile and equal their references on it."""

from __future__ import annotations

import importlib
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator

import torch
import triton
from gpu_check_finding import Finding
from gpu_check_stage import in_workers

from kvern.kernels import ceilings, target
from kvern.kernels.check import find_checks
from kvern.kernels.launch_case import find_cases

READS, COPIES, PRODUCTS = "reads only", "copies", "products in bfloat16"

ENGINES = {"engine: small model": "gpu_check_engine:start", "engine: 8B's shape": "gpu_check_steps:start_one_layer"}
"""What starts an engine whose kernels a later stage needs, as "module:function"."""


def measure_ceilings(device: str, known: dict[str, float]) -> Iterator[Finding]:
    """Say what is there, and measure what it can do at most."""
    gpu = torch.device(device)
    properties = torch.cuda.get_device_properties(gpu)
    yield Finding("GPU", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    yield Finding("compute capability", f"{properties.major}.{properties.minor}")
    yield Finding("driver", _driver_version())
    yield Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    yield Finding("Triton", triton.__version__)
    yield Finding("Python", platform.python_version())
    yield Finding(READS, ceilings.read_bandwidth(gpu) / 1e9, "GB/s")
    yield Finding(COPIES, ceilings.copy_bandwidth(gpu) / 1e9, "GB/s")
    yield Finding(PRODUCTS, ceilings.gemm_flops(gpu) / 1e12, "TFLOP/s")


def _driver_version() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def compile_cases(device: str, known: dict[str, float]) -> Iterator[Finding]:
    """Launch what a model launches once, into Triton's cache on disk, where later stages find it.

    Engines come last: they find most of theirs.
    """
    started = time.monotonic()
    architecture = target.architecture()
    names = [name for name, case in find_cases().items() if case.min_architecture <= architecture]
    yield from in_workers(launch, [*names, *ENGINES], device)
    yield Finding("compiled all", time.monotonic() - started, "s")


def compare_with_references(device: str, known: dict[str, float]) -> Iterator[Finding]:
    """Run the comparisons that the interpreter's tests run."""
    architecture = target.architecture()
    names = [name for name, check in find_checks().items() if check.min_architecture <= architecture]
    yield from in_workers(run_check, names, device)


def launch(name: str, device: str) -> str:
    """Return what is wrong with a launch case or an engine, or nothing."""
    try:
        if name in ENGINES:
            module, _, function = ENGINES[name].partition(":")
            getattr(importlib.import_module(module), function)(device)
        else:
            find_cases()[name].launch(torch.device(device))
        _finish(device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_check(name: str, device: str) -> str:
    """Return how a kernel differs from its reference, or nothing."""
    torch.set_num_threads(1)
    check = find_checks()[name]
    try:
        check.run(torch.device(device))
        _finish(device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _finish(device: str) -> None:
    """Wait for what was launched, and leave memory to the other workers."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
