"""The definition of paged attention, slow and plain: what every backend is tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv(kv: Tensor, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's key and value in its slot, none where the slot is -1."""
    block_size = kv.shape[4]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            kv[block, layer, 0, :, offset] = k[token]
            kv[block, layer, 1, :, offset] = v[token]


def paged_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    block_table: Tensor,
    cu_query_lens: Tensor,
    context_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return softmax(q @ k * scale) @ v for each query over the tokens up to its own, in float64.

    With a sliding window, only over that many last ones. With a softcap, scores are softcap * tanh(score / softcap).
    Shapes are those of the launcher. Returns [num_tokens, num_heads, head_dim] float64.
    """
    out = torch.empty(q.shape, dtype=torch.float64)
    starts = cu_query_lens.tolist()
    for sequence, context_len in enumerate(context_lens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        keys, values = _gather(kv[:, layer], block_table[sequence].tolist(), context_len)
        for token in range(begin, end):
            visible = context_len - (end - 1 - token)
            first = 0 if sliding_window is None else max(0, visible - sliding_window)
            out[token] = _attend(q[token], keys[first:visible], values[first:visible], scale, softcap)
    return out


def _gather(kv: Tensor, block_ids: list[int], context_len: int) -> tuple[Tensor, Tensor]:
    """Return a sequence's keys and values: [context_len, num_kv_heads, head_dim] float64 each."""
    block_size = kv.shape[3]
    slots = [(block_ids[position // block_size], position % block_size) for position in range(context_len)]
    tokens = torch.stack([kv[block, :, :, offset] for block, offset in slots]).to(torch.float64)
    return tokens[:, 0], tokens[:, 1]


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Attend one token's query heads: [num_heads, head_dim]. Neighbouring heads share a KV head."""
    group_size = q.shape[0] // keys.shape[1]
    heads = []
    for head, query in enumerate(q.to(torch.float64)):
        kv_head = head // group_size
        scores = keys[:, kv_head] @ query * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        heads.append(torch.softmax(scores, dim=0) @ values[:, kv_head])
    return torch.stack(heads)
