"""What kernels that numba compiles for a CPU share.

Those in bfloat16 take addresses: torch takes longer to make arrays, and numba to unpack them, than a small kernel runs.
They read it as 16 bit integers, compute in float32, and round to the nearest, to even where two are as near.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from kvern.kernels.cpu_threads import run as run_on_threads


def has_feature(name: str) -> bool:
    """Whether numba compiles for a CPU with a feature, by LLVM's name for it."""
    is_for_this_one = numba.config.CPU_NAME is None and numba.config.CPU_FEATURES is None
    return is_for_this_one and bool(binding.get_host_cpu_features().get(name, False))


HAS_BF16 = has_feature("avx512bf16")
"""Whether the CPU multiplies bfloat16."""


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


_SMALL = 32768
"""Elements that one thread is done with before two have shared them out."""

_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_C5, _C4, _C3, _C2, _C1, _C0 = (np.float32(coefficient) for coefficient in _COEFFICIENTS)


Argument = int | str
"""A number or an address, or a symbol: the name of one that a program is told each time it runs."""


class Operation(NamedTuple):
    """A kernel, and its arguments behind the count that `take` keeps. However many threads run it, they share it."""

    kernel: Any
    arguments: tuple[Any, ...]
    """Each an `Argument`."""
    at: int = 0
    """Of a kernel that is called with another address than that of its arguments."""


def compiled(function: Any) -> Any:
    """Compile a function that kernels call. Nothing fuses: every product and every sum is rounded, in whatever loop.

    It is kept in their files, not in some of its own: those of a function for several types get mixed up where two
    processes write them at once.
    """
    return numba.njit(nogil=True, error_model="numpy")(function)


def thread_kernel(function: Any) -> Any:
    """Compile an operation's kernel: a function of the address of its count and arguments, which each thread calls.

    What was compiled before is found by where a function is written, not by what it calls in other files.
    """
    signature, options = types.void(types.int64), {"nopython": True, "error_model": "numpy"}
    try:
        return numba.cfunc(signature, cache=True, **options)(function)
    except RuntimeError:  # no folder that could be written to
        return numba.cfunc(signature, **options)(function)


def run(operation: Operation, num_threads: int) -> None:
    """Run an operation without symbols on so many threads, and wait for all."""
    arguments = (ctypes.c_int64 * (len(operation.arguments) + 1))(0, *operation.arguments)
    run_on_threads(operation.kernel, ctypes.addressof(arguments), num_threads)


@intrinsic  # type: ignore[untyped-decorator]
def take(typing: Any, arguments: Any, count: Any) -> tuple[Any, Callable[..., Any]]:
    """Take the next `count` parts of the work, and return the first. Every thread takes others."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        counter = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, values[1], "monotonic")

    return types.int64(types.int64, types.int64), generate


def threads_for(num_elements: int) -> int:
    """Return how many threads to share work out to that takes as long as an exponential for each element."""
    return 1 if num_elements < _SMALL else torch.get_num_threads()


def _pointer_to(element: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(typing: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generate

    return pointer


_uint16_pointer = _pointer_to(types.uint16)
_int64_pointer = _pointer_to(types.int64)
_float32_pointer = _pointer_to(types.float32)
_float64_pointer = _pointer_to(types.float64)


@compiled
def bfloats(address, size):  # type: ignore[no-untyped-def]
    """Return the [size] numbers in bfloat16 at an address, as their bits."""
    return numba.carray(_uint16_pointer(address), (size,))


@compiled
def integers(address, size):  # type: ignore[no-untyped-def]
    """Return the [size] int64 at an address."""
    return numba.carray(_int64_pointer(address), (size,))


@compiled
def floats(address, size):  # type: ignore[no-untyped-def]
    """Return the [size] float32 at an address."""
    return numba.carray(_float32_pointer(address), (size,))


@compiled
def doubles(address, size):  # type: ignore[no-untyped-def]
    """Return the [size] float64 at an address."""
    return numba.carray(_float64_pointer(address), (size,))


@compiled
def widened(bits):  # type: ignore[no-untyped-def]
    """Return a number in float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@compiled
def rounded(value):  # type: ignore[no-untyped-def]
    """Return the bits of a float32 in bfloat16."""
    bits = np.float32(value).view(np.uint32)
    nearest = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.uint16((np.uint32(0x7FC00000) if value != value else nearest) >> np.uint32(16))


@compiled
def exponential(x):  # type: ignore[no-untyped-def]
    """Return e^x in float32, for x from -87 to 87.

    Source of range reduction and coefficients: expf of the Cephes library, https://netlib.org/cephes.
    """
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    y = ((((_C5 * r + _C4) * r + _C3) * r + _C2) * r + _C1) * r + _C0
    y = y * (r * r) + r + np.float32(1.0)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23))
    return y * power.view(np.float32)
