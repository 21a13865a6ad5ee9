"""Compiled functions on the threads of torch's own pool."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch


def run(function: Any, address: int, num_threads: int) -> None:
    """Call a function of numba's, of one address, on so many threads at once, and wait for all.

    There may be fewer: `address_of_num_threads` tells.
    """
    _parallel()(function.address, address, num_threads, 0)


@cache
def address_of_num_threads() -> int:
    """Return the address of a function that tells how many threads run where it is called. 0: there is none but one."""
    return _address(_torch(), "omp_get_num_threads") if hasattr(_torch(), "GOMP_parallel") else 0


@cache
def address_of_yield() -> int:
    """Return the address of a function that lets others have the core."""
    return _address(ctypes.CDLL(None), "sched_yield")


@cache
def _parallel() -> Callable[[int, int, int, int], object]:
    """Return what OpenMP runs torch's operators with: `GOMP_parallel`, of the library that torch is linked with.

    A second pool, such as numba's, would fight over the cores with it, and takes 50 us longer to start where torch's is
    the only OpenMP there is. A torch without OpenMP has threads of another kind: there the caller's is the only one.
    """
    if not hasattr(_torch(), "GOMP_parallel"):
        return _serial
    parallel = _torch().GOMP_parallel
    parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return cast(Callable[[int, int, int, int], object], parallel)


@cache
def _torch() -> ctypes.CDLL:
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"))


def _serial(function: int, argument: int, num_threads: int, flags: int) -> None:
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
