"""Rotation and KV write as engines launch them: what differs in what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.launch_case import LaunchCase
from kvern.kernels.rotary_kv import rotary_kv

_FP8 = torch.float8_e4m3fn


def cases() -> Iterator[LaunchCase]:
    """Llama 3 8B and its like. float32 is for comparing on small models."""
    half = torch.bfloat16
    yield LaunchCase("8B", half, partial(_launch, dtype=half))
    yield LaunchCase("8B, fp8 KV", _FP8, partial(_launch, dtype=half, kv_dtype=_FP8), min_architecture=90)
    yield LaunchCase("no rotation", half, partial(_launch, dtype=half, rotary_dim=None))
    yield LaunchCase("part rotation, 80 a head", torch.float16, partial(_launch, dtype=torch.float16, head_dim=80))
    yield LaunchCase("64 heads", half, partial(_launch, dtype=half, num_heads=64))
    yield LaunchCase("256 a head", half, partial(_launch, dtype=half, head_dim=256, num_heads=16))
    small = partial(_launch, dtype=torch.float32, head_dim=64, num_heads=9, num_kv_heads=3)
    yield LaunchCase("small model", torch.float32, small)


def _launch(
    device: torch.device,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    head_dim: int = 128,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    rotary_dim: int | None = 32,
) -> None:
    heads = torch.zeros(16, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos = torch.zeros(16, 1, rotary_dim or 0, dtype=dtype, device=device)
    kv = torch.zeros(1, 32, 2, num_kv_heads, 16, head_dim, dtype=dtype, device=device).to(kv_dtype or dtype)
    rotary_kv(
        q,
        k,
        v,
        None if rotary_dim is None else (cos, cos),
        kv,
        3,
        torch.zeros(16, dtype=torch.int64, device=device),
        None if kv_dtype is None else torch.ones(2, 32, num_kv_heads, device=device),
    )
