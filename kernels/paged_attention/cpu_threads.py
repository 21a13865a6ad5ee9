"""Compiled functions on the threads of torch's own pool."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch


def run(function: Any, argument: ctypes.Structure, num_threads: int) -> None:
    """Call a function of numba's, of one address, on so many threads at once, and wait for all."""
    _parallel()(function.address, ctypes.addressof(argument), num_threads, 0)


@cache
def _parallel() -> Callable[[int, int, int, int], object]:
    """Return what OpenMP runs torch's operators with: `GOMP_parallel`, of the library that torch is linked with.

    A second pool, such as numba's, would fight over the cores with it, and takes 50 us longer to start where torch's is
    the only OpenMP there is. A torch without OpenMP has threads of another kind: there the caller's is the only one.
    """
    suffix = "dylib" if sys.platform == "darwin" else "so"
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"))
    if not hasattr(library, "GOMP_parallel"):
        return _serial
    parallel = library.GOMP_parallel
    parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return cast(Callable[[int, int, int, int], object], parallel)


def _serial(function: int, argument: int, num_threads: int, flags: int) -> None:
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
