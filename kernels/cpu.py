"""What kernels that numba compiles for a CPU share.

Those in bfloat16 take addresses: torch takes longer to make arrays, and numba to unpack them, than a small kernel runs.
They read it as 16 bit integers, compute in float32, and round to the nearest, to even where two are as near.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

_MOST_THREADS: int = numba.config.NUMBA_NUM_THREADS

_told = threading.local()
"""What numba was told last, which it keeps for each thread."""

_SMALL = 32768
"""Elements that one thread is done with before two have shared them out."""

_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_C5, _C4, _C3, _C2, _C1, _C0 = (np.float32(coefficient) for coefficient in _COEFFICIENTS)


def compiled(function: Any, **options: Any) -> Any:
    """Compile a function. Nothing fuses: every product and every sum is rounded, in whatever loop.

    What was compiled before is found by where a function is written, not by its options, nor by what it calls in other
    files: none is compiled both with `parallel` and without.
    """
    options = {"nogil": True, "error_model": "numpy"} | options
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder that could be written to
        return numba.njit(**options)(function)


def threads_for(num_elements: int) -> int:
    """Return how many threads to share work out to, which is a product's or takes as long as an exponential each."""
    return 1 if num_elements < _SMALL else num_threads()


def num_threads() -> int:
    """Return how many threads torch would take, of those that numba has, and let numba take as many on this thread."""
    count = min(torch.get_num_threads(), _MOST_THREADS)
    if getattr(_told, "count", None) != count:
        numba.set_num_threads(count)
        _told.count = count
    return count


def _pointer_to(element: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(typing: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generate

    return pointer


_uint16_pointer = _pointer_to(types.uint16)
_int64_pointer = _pointer_to(types.int64)


@compiled
def bfloats(address, size):  # type: ignore[no-untyped-def]
    """Return the [size] numbers in bfloat16 at an address, as their bits."""
    return numba.carray(_uint16_pointer(address), (size,))


@compiled
def integers(address, size):  # type: ignore[no-untyped-def]
    """Return the [size] int64 at an address."""
    return numba.carray(_int64_pointer(address), (size,))


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
