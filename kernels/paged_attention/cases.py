"""Attention as engines launch it: what differs in what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.launch_case import LaunchCase
from kvern.kernels.paged_attention import paged_attention, plan_attention, write_kv


def cases() -> Iterator[LaunchCase]:
    """Llama 3 8B and its like, decodes beside a chunk. float32 is for comparing on small models."""
    yield _case("8B", torch.bfloat16)
    yield _case("8B, fp8 KV", torch.float8_e4m3fn, min_architecture=90)
    yield _case("64 a head, window", torch.float16, head_dim=64, window=4096)
    yield _case("256 a head, window and cap", torch.bfloat16, head_dim=256, num_heads=16, window=4096, softcap=50.0)
    yield _case("small model", torch.float32, head_dim=64, num_heads=9, num_kv_heads=3)


def _case(
    name: str,
    dtype: torch.dtype,
    *,
    head_dim: int = 128,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    window: int | None = None,
    softcap: float | None = None,
    min_architecture: int = 80,
) -> LaunchCase:
    launch = partial(
        _launch,
        dtype=dtype,
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        window=window,
        softcap=softcap,
    )
    return LaunchCase(name, dtype, launch, min_architecture)


def _launch(
    device: torch.device,
    *,
    dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """Four decodes and a chunk of 12 tokens on the first block."""
    is_fp8 = dtype.itemsize == 1
    shape = (1, 32, 2, num_kv_heads, 16, head_dim)
    kv = torch.zeros(shape, dtype=torch.uint8 if is_fp8 else dtype, device=device).view(dtype)
    activation = torch.bfloat16 if is_fp8 else dtype
    q, k, v = (
        torch.zeros(16, heads, head_dim, dtype=activation, device=device)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    metadata = plan_attention(
        kv,
        torch.zeros(5, 512, dtype=torch.int32, device=device),
        torch.tensor([0, 1, 2, 3, 4, 16], dtype=torch.int32, device=device),
        torch.tensor([1, 2, 3, 4, 12], dtype=torch.int32, device=device),
        torch.zeros(16, dtype=torch.int64, device=device),
        (window,),
        backend="triton",
        kv_scales=torch.ones(2, 32, num_kv_heads, device=device) if is_fp8 else None,
    )
    write_kv(kv, 1, k, v, metadata)
    paged_attention(q, kv, 1, metadata, head_dim**-0.5, sliding_window=window, softcap=softcap)
