"""Random steps of attention, to compare backends with the reference on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvern.kernels.paged_attention import AttentionMetadata, paged_attention, plan_attention, reference, write_kv

NUM_LAYERS = 3
LAYER = 1
SCALE = 0.125


@dataclass
class RandomStep:
    """A random step over a pool whose every element outside the contexts is NaN."""

    kv: Tensor
    block_table: Tensor
    cu_query_lens: Tensor
    context_lens: Tensor
    slot_mapping: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    def plan(self, *windows: int | None, **options: Any) -> AttentionMetadata:
        return plan_attention(
            self.kv,
            self.block_table,
            self.cu_query_lens,
            self.context_lens,
            self.slot_mapping,
            windows or (None,),
            **options,
        )


def make_step(
    query_lens: list[int],
    context_lens: list[int],
    *,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    layer_major: bool = False,
) -> RandomStep:
    """Blocks are dealt out at random; the KV of this step's own tokens is yet to be written."""
    generator = torch.Generator().manual_seed(len(query_lens) * 1000 + sum(context_lens))
    needed = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(needed) + 3
    shape = (num_blocks, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim)
    kv = torch.full(shape, float("nan"), dtype=dtype)
    if layer_major:
        kv = kv.transpose(0, 1).contiguous().transpose(0, 1)
    deck = torch.randperm(num_blocks, generator=generator).tolist()
    table = torch.full((len(query_lens), max(needed) + 2), 2**31 - 1, dtype=torch.int32)
    slots = []
    for row, (count, length) in enumerate(zip(query_lens, context_lens, strict=True)):
        blocks = [deck.pop() for _ in range(needed[row])]
        table[row, : len(blocks)] = torch.tensor(blocks)
        places = [(blocks[position // block_size], position % block_size) for position in range(length)]
        for block, offset in places[: length - count]:
            kv[block, :, :, :, offset] = torch.randn(NUM_LAYERS, 2, num_kv_heads, head_dim, generator=generator).to(
                dtype
            )
        slots += [block * block_size + offset for block, offset in places[length - count :]]

    def random(heads: int) -> Tensor:
        return torch.randn(len(slots), heads, head_dim, generator=generator).to(dtype)

    return RandomStep(
        kv=kv,
        block_table=table,
        cu_query_lens=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        q=random(num_heads),
        k=random(num_kv_heads),
        v=random(num_kv_heads),
    )


def run(step: RandomStep, window: int | None = None, softcap: float | None = None, **options: Any) -> Tensor:
    """Write the step's KV and attend one layer. options: of `plan_attention`."""
    metadata = step.plan(None, window, **options)
    write_kv(step.kv, LAYER, step.k, step.v, metadata)
    return paged_attention(step.q, step.kv, LAYER, metadata, SCALE, sliding_window=window, softcap=softcap)


def run_reference(step: RandomStep, window: int | None = None, softcap: float | None = None) -> Tensor:
    reference.write_kv(step.kv, LAYER, step.k, step.v, step.slot_mapping)
    return attend_reference(step, window, softcap)


def attend_reference(step: RandomStep, window: int | None = None, softcap: float | None = None) -> Tensor:
    """As `run_reference`, where the KV is written already."""
    return reference.paged_attention(
        step.q,
        step.kv,
        LAYER,
        step.block_table,
        step.cu_query_lens,
        step.context_lens,
        SCALE,
        window,
        softcap,
    )
