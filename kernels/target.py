"""What Triton kernels run on: a GPU, or the interpreter that runs them on a CPU in tests."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

_INTERPRETED_ARCHITECTURE = 90
_INTERPRETED_MULTIPROCESSORS = 4


def is_interpreted() -> bool:
    """TRITON_INTERPRET=1 was set when Triton was imported."""
    return bool(triton.knobs.runtime.interpret)


def architecture() -> int:
    """Return the compute capability of the current device, major times ten plus minor: 90 for an H100."""
    if is_interpreted():
        return _INTERPRETED_ARCHITECTURE
    return _architecture(driver.active.get_current_device())


def num_multiprocessors() -> int:
    """Return how many multiprocessors the current device has."""
    if is_interpreted():
        return _INTERPRETED_MULTIPROCESSORS
    return _num_multiprocessors(driver.active.get_current_device())


def compute_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return what kernels convert loads of `dtype` to before arithmetic and `tl.dot`.

    The interpreter holds bfloat16 as 16-bit integers and computes on those without a word, so there it is float32.
    fp8 goes through float16, which holds each of its values exactly.
    """
    if is_interpreted() or dtype is torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype is torch.bfloat16 else tl.float16


@cache
def _architecture(device: int) -> int:
    return int(driver.active.get_current_target().arch)


@cache
def _num_multiprocessors(device: int) -> int:
    return int(driver.active.utils.get_device_properties(device)["multiprocessor_count"])
