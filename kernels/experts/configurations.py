"""How the products of experts are tiled on each GPU. Chosen so that nothing spills.

A token's result depends on BLOCK_K and on nothing else here, and on no size of the batch. BLOCK_M is for few tokens an
expert, where reading the weights is what takes time; below 64 rows, Hopper's matrix units stay idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Configuration:
    block_m: int
    """Tokens of one expert."""
    block_n: int
    """Output features; of gates and of ups as many each."""
    block_k: int
    num_warps: int
    num_stages: int


_HALF = {
    80: Configuration(block_m=64, block_n=64, block_k=64, num_warps=8, num_stages=3),
    90: Configuration(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=4),
    100: Configuration(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=4),
}
_SINGLE = Configuration(block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=2)


def choose(architecture: int, dtype: torch.dtype) -> Configuration:
    """Return the configuration of the nearest architecture that is not above."""
    if dtype is torch.float32:
        return _SINGLE
    return _HALF[max(known for known in _HALF if known <= architecture)]
