"""What a GPU can do at most, measured: what kernels are compared with, in the same run."""

from __future__ import annotations

from collections.abc import Callable

import torch

_READ_BYTES = 2 << 30
_COPIED_BYTES = 1 << 30
_GEMM_SIZE = 8192
_BLOCK = 4096
_BLOCKS_A_PROGRAM = 16


def median_s(work: Callable[[], object]) -> float:
    """Return the seconds that a launch takes, caches cleared before each. Compiles and warms up first."""
    import triton.testing

    return float(triton.testing.do_bench(work, return_mode="median")) / 1000


def read_bandwidth(device: torch.device) -> float:
    """Return bytes a second of a kernel that reads only."""
    memory = torch.zeros(_READ_BYTES // 4, dtype=torch.int32, device=device)
    return _READ_BYTES / median_s(lambda: read(memory))


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes a second of a copy within the device, what is read and what is written together."""
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return 2 * _COPIED_BYTES / median_s(lambda: destination.copy_(source))


def gemm_flops(device: torch.device) -> float:
    """Return operations a second of a large product in bfloat16, as cuBLAS does it."""
    left, right = torch.randn(2, _GEMM_SIZE, _GEMM_SIZE, dtype=torch.bfloat16, device=device)
    return 2 * _GEMM_SIZE**3 / median_s(lambda: left @ right)


def read(memory: torch.Tensor) -> torch.Tensor:
    """Return sums of parts of `memory`, int32, so that all of it is read. Its length is a multiple of 65,536."""
    from kvern.kernels.ceilings.kernel import read_kernel

    size = _BLOCK * _BLOCKS_A_PROGRAM
    sums = torch.empty(len(memory) // size, dtype=torch.int32, device=memory.device)
    read_kernel[(len(sums),)](memory, sums, BLOCK=_BLOCK, NUM_BLOCKS=_BLOCKS_A_PROGRAM, num_warps=8)
    return sums
