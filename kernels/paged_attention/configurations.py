"""How the kernels are tiled on each GPU. Chosen so that nothing spills; docs/kernels.md has what each takes.

`make gpu-check TUNE=1` rewrites rows of the tables below that are literal.

A sequence's result depends on SPLIT and on block_n, and on nothing else here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")

SPLIT = 512
"""Tokens of a context that one decode program attends before it is summed with the others."""


@dataclass(frozen=True, slots=True)
class DecodeConfiguration:
    block_n: int
    """Tokens a tile. Divides SPLIT."""
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    """Of the fixed grid."""


@dataclass(frozen=True, slots=True)
class PrefillConfiguration:
    block_m: int
    """Query tokens times heads of a group a tile."""
    block_n: int
    num_warps: int
    num_stages: int


_DECODE = {
    80: {
        64: DecodeConfiguration(block_n=64, num_warps=4, num_stages=7, programs_per_multiprocessor=2),
        128: DecodeConfiguration(block_n=32, num_warps=4, num_stages=7, programs_per_multiprocessor=2),
        256: DecodeConfiguration(block_n=32, num_warps=4, num_stages=5, programs_per_multiprocessor=1),
    },
    90: {
        64: DecodeConfiguration(block_n=64, num_warps=4, num_stages=7, programs_per_multiprocessor=2),
        128: DecodeConfiguration(block_n=64, num_warps=4, num_stages=5, programs_per_multiprocessor=2),
        256: DecodeConfiguration(block_n=32, num_warps=4, num_stages=5, programs_per_multiprocessor=2),
    },
    100: {
        64: DecodeConfiguration(block_n=64, num_warps=4, num_stages=7, programs_per_multiprocessor=2),
        128: DecodeConfiguration(block_n=64, num_warps=4, num_stages=5, programs_per_multiprocessor=2),
        256: DecodeConfiguration(block_n=32, num_warps=4, num_stages=5, programs_per_multiprocessor=2),
    },
}
"""By architecture, and by the least listed head size that holds the model's. KV of two bytes or one.

A tile's keys and values wait for its block ids, so that num_stages = 2 n + 1 keeps n tiles in flight.
"""

_PREFILL = {
    80: {
        64: PrefillConfiguration(block_m=128, block_n=64, num_warps=8, num_stages=5),
        128: PrefillConfiguration(block_m=128, block_n=64, num_warps=8, num_stages=5),
        256: PrefillConfiguration(block_m=64, block_n=32, num_warps=8, num_stages=3),
    },
    90: {
        64: PrefillConfiguration(block_m=128, block_n=64, num_warps=8, num_stages=5),
        128: PrefillConfiguration(block_m=128, block_n=64, num_warps=8, num_stages=5),
        256: PrefillConfiguration(block_m=64, block_n=64, num_warps=8, num_stages=3),
    },
    100: {
        64: PrefillConfiguration(block_m=128, block_n=128, num_warps=8, num_stages=3),
        128: PrefillConfiguration(block_m=128, block_n=64, num_warps=8, num_stages=5),
        256: PrefillConfiguration(block_m=64, block_n=64, num_warps=8, num_stages=3),
    },
}

_FP8_PREFILL = {
    90: _PREFILL[90] | {256: PrefillConfiguration(block_m=32, block_n=64, num_warps=8, num_stages=3)},
    100: _PREFILL[100],
}

_FLOAT32_DECODE = {
    128: DecodeConfiguration(block_n=16, num_warps=8, num_stages=2, programs_per_multiprocessor=2),
    256: DecodeConfiguration(block_n=16, num_warps=4, num_stages=2, programs_per_multiprocessor=2),
}
_FLOAT32_PREFILL = {
    64: PrefillConfiguration(block_m=32, block_n=16, num_warps=8, num_stages=2),
    256: PrefillConfiguration(block_m=16, block_n=16, num_warps=8, num_stages=2),
}
"""No tensor core computes float32 at full precision. It is for comparing, on small models; on every architecture."""


def decode_configuration(architecture: int, element_size: int, head_dim: int) -> DecodeConfiguration:
    """Return the tiling for KV of so many bytes an element. Raises ValueError where there is none."""
    if element_size == 4:
        return _by_head_dim(_FLOAT32_DECODE, head_dim)
    return _by_head_dim(_by_architecture(_DECODE, architecture), head_dim)


def prefill_configuration(architecture: int, element_size: int, head_dim: int) -> PrefillConfiguration:
    """Return the tiling for KV of so many bytes an element. Raises ValueError where there is none."""
    if element_size == 4:
        return _by_head_dim(_FLOAT32_PREFILL, head_dim)
    return _by_head_dim(_by_architecture(_FP8_PREFILL if element_size == 1 else _PREFILL, architecture), head_dim)


def _by_architecture(table: dict[int, dict[int, _T]], architecture: int) -> dict[int, _T]:
    """An architecture that is not listed is tiled as the newest before it."""
    listed = [each for each in table if each <= architecture]
    if not listed:
        raise ValueError(f"compute capability {architecture / 10} is older than 8.0, the oldest there are kernels for")
    return table[max(listed)]


def _by_head_dim(sizes: dict[int, _T], head_dim: int) -> _T:
    fitting = [size for size in sizes if size >= head_dim]
    if not fitting:
        raise ValueError(f"a head size of {head_dim} has no configuration; {max(sizes)} is the largest that has")
    return sizes[min(fitting)]
