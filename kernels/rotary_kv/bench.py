"""Rotation and KV write of Llama 3 8B, in bytes a second: `python -m kvern.kernels.rotary_kv.bench`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.ceilings.rates import Work, print_rates
from kvern.kernels.rotary_kv import rotary_kv

_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _NUM_LAYERS, _BLOCK_SIZE = 32, 8, 128, 4, 16
"""With fewer layers than the model has."""


def works(device: torch.device) -> Iterator[Work]:
    """A decode step of 64 sequences, and a chunk of 8,192 tokens, in slots dealt out at random."""
    shape = (4096, _NUM_LAYERS, 2, _NUM_KV_HEADS, _BLOCK_SIZE, _HEAD_DIM)
    for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        kv = torch.zeros(shape, dtype=kv_dtype, device=device)
        is_fp8 = kv_dtype.itemsize == 1
        scales = torch.ones(2, _NUM_LAYERS, _NUM_KV_HEADS, device=device) if is_fp8 else None
        for num_tokens in (64, 8192):
            name = f"{num_tokens:,} tokens, {kv_dtype} KV".replace("torch.", "")
            yield _work(name, kv, num_tokens, scales)


def _work(name: str, kv: torch.Tensor, num_tokens: int, scales: torch.Tensor | None) -> Work:
    device, num_heads = kv.device, _NUM_HEADS + 2 * _NUM_KV_HEADS
    heads = torch.randn(num_tokens, num_heads, _HEAD_DIM, dtype=torch.bfloat16, device=device)
    q, k, v = torch.split(heads, [_NUM_HEADS, _NUM_KV_HEADS, _NUM_KV_HEADS], dim=1)
    cos = torch.ones(num_tokens, 1, _HEAD_DIM, dtype=torch.bfloat16, device=device)
    slots = torch.randperm(len(kv) * _BLOCK_SIZE, device=device)[:num_tokens]
    num_bytes = 2 * (heads.numel() + q.numel() + 2 * cos.numel()) + 2 * k.numel() * kv.element_size()
    return Work(name, partial(rotary_kv, q, k, v, (cos, cos), kv, 1, slots, scales), num_bytes)


if __name__ == "__main__":
    sys.exit(print_rates(works))
