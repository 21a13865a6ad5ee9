"""Paged attention in torch: gather a sequence's blocks, then dense attention.

Sequences with one query token are batched, those of like context length together, so that little is padded. Longer
runs of queries go one sequence at a time, in tiles. Blocks may hold anything, NaN too, past a sequence's context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

_TILE = 128
"""Most queries of one chunk attended together: bounds the mask, and skips most of what causality hides."""

_MAX_PADDING = 1.5
"""Longest context of a group over its shortest, in blocks."""

_GROUP_BYTES = 4 << 20
"""Most KV gathered for one group: what a processor's caches hold between gathering and attending."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with one query token each."""

    tokens: Tensor
    """[group] rows of q."""
    kv_rows: Tensor
    """[2 * group * num_kv_heads * num_blocks] rows to gather, of block_size * head_dim elements."""
    hidden_rows: Tensor
    """Gathered rows of head_dim elements that lie past their sequence's context, in its last block."""
    mask: Tensor
    """[group, 1, 1, num_blocks * block_size], 0 or -inf. What pads a sequence to the group's length is its own first
    block, so that nobody else's numbers come near it."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence's run of query tokens, q[begin:end]."""

    begin: int
    end: int
    context_len: int
    kv_rows: Tensor
    """[2 * num_kv_heads * num_blocks] rows to gather, of block_size * head_dim elements."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A step, ready to run for any layer. Rows count from the layer's first element on."""

    written: Tensor | None
    """Tokens whose KV is stored. None: all."""
    write_rows: Tensor
    """[num_written * num_kv_heads] rows of head_dim elements that the keys go to."""
    groups: tuple[_Group, ...]
    chunks: tuple[_Chunk, ...]
    causal_mask: Tensor
    """[_TILE, longest context of a chunk], 0 or -inf: of any tile, the mask is the lower right corner."""
    workspace: Tensor
    """[rows, block_size * head_dim] for what is gathered. One allocation a step: fresh memory costs page faults."""


def plan(
    kv: Tensor, block_table: Tensor, query_starts: list[int], context_lens: list[int], slot_mapping: Tensor
) -> Plan:
    """Prepare a step. query_starts has one more item than there are sequences; the rest is as in the launcher."""
    block_size, head_dim = kv.shape[4:]
    num_blocks = [-(-length // block_size) for length in context_lens]
    decodes, chunks = [], []
    for sequence, (begin, end) in enumerate(pairwise(query_starts)):
        if end - begin == 1:
            decodes.append(sequence)
        else:
            rows = _gather_rows(kv, block_table[sequence : sequence + 1, : num_blocks[sequence]])
            chunks.append(_Chunk(begin, end, context_lens[sequence], rows))
    groups = [
        _plan_group(kv, block_table, members, query_starts, context_lens)
        for members in _alike(decodes, num_blocks, kv[0, 0].numel() * kv.element_size())
    ]
    is_written = slot_mapping >= 0
    written = None if bool(is_written.all()) else is_written.nonzero().flatten()
    most_rows = max(len(rows) for rows in [group.kv_rows for group in groups] + [chunk.kv_rows for chunk in chunks])
    return Plan(
        written=written,
        write_rows=_write_rows(kv, slot_mapping[is_written]),
        groups=tuple(groups),
        chunks=tuple(chunks),
        causal_mask=_causal_mask(max((chunk.context_len for chunk in chunks), default=_TILE), kv),
        workspace=kv.new_empty(most_rows, block_size * head_dim),
    )


def write_kv(kv: Tensor, layer: int, k: Tensor, v: Tensor, plan: Plan) -> None:
    """Store the step's keys and values of one layer."""
    head_dim = kv.shape[5]
    if plan.written is not None:
        k, v = k[plan.written], v[plan.written]
    for part, values in enumerate((k, v)):
        rows = _rows(kv, layer, part, head_dim)
        rows.index_copy_(0, plan.write_rows, values.reshape(-1, head_dim))


def paged_attention(q: Tensor, kv: Tensor, layer: int, plan: Plan, scale: float) -> Tensor:
    """Attend one layer. Shapes as in the launcher."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows = _rows(kv, layer, 0, plan.workspace.shape[1])
    for group in plan.groups:
        _attend_group(q, rows, group, plan.workspace, kv.shape[3], scale, out)
    for chunk in plan.chunks:
        _attend_chunk(q, rows, chunk, plan, kv.shape[3], scale, out)
    return out


def _attend_group(
    q: Tensor, rows: Tensor, group: _Group, workspace: Tensor, num_kv_heads: int, scale: float, out: Tensor
) -> None:
    """Query heads that share a KV head stand as queries of that head."""
    size, num_heads, head_dim = len(group.tokens), q.shape[1], q.shape[2]
    gathered = torch.index_select(rows, 0, group.kv_rows, out=workspace[: len(group.kv_rows)]).view(-1, head_dim)
    gathered.index_fill_(0, group.hidden_rows, 0)
    keys, values = gathered.view(2, size, num_kv_heads, -1, head_dim)
    queries = q.index_select(0, group.tokens).view(size, num_kv_heads, -1, head_dim)
    attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, scale=scale)
    out.index_copy_(0, group.tokens, attended.reshape(size, num_heads, head_dim))


def _attend_chunk(
    q: Tensor, rows: Tensor, chunk: _Chunk, plan: Plan, num_kv_heads: int, scale: float, out: Tensor
) -> None:
    """Each tile of queries sees the context up to its own last token."""
    gathered = torch.index_select(rows, 0, chunk.kv_rows, out=plan.workspace[: len(chunk.kv_rows)])
    keys, values = gathered.view(2, 1, num_kv_heads, -1, q.shape[2])
    for begin in range(chunk.begin, chunk.end, _TILE):
        end = min(begin + _TILE, chunk.end)
        visible = chunk.context_len - (chunk.end - end)
        attended = functional.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1)[None],
            keys[:, :, :visible],
            values[:, :, :visible],
            attn_mask=plan.causal_mask[begin - end :, -visible:],
            scale=scale,
            enable_gqa=True,
        )
        out[begin:end] = attended[0].transpose(0, 1)


def _alike(sequences: list[int], blocks: list[int], bytes_per_block: int) -> Iterator[list[int]]:
    """Part sequences into groups of like length, longest first, each within the bounds above."""
    group: list[int] = []
    for sequence in sorted(sequences, key=blocks.__getitem__, reverse=True):
        longest = blocks[group[0]] if group else blocks[sequence]
        too_short = blocks[sequence] * _MAX_PADDING < longest
        if group and (too_short or (len(group) + 1) * longest * bytes_per_block > _GROUP_BYTES):
            yield group
            group = []
        group.append(sequence)
    if group:
        yield group


def _plan_group(
    kv: Tensor, block_table: Tensor, members: list[int], query_starts: list[int], context_lens: list[int]
) -> _Group:
    device, (num_kv_heads, block_size) = kv.device, kv.shape[3:5]
    lengths = torch.tensor([context_lens[member] for member in members], device=device)[:, None]
    num_blocks = -(-context_lens[members[0]] // block_size)
    positions = torch.arange(num_blocks * block_size, device=device)
    table = block_table[torch.tensor(members, device=device), :num_blocks]
    table = torch.where(positions[::block_size] < lengths, table, table[:, :1])
    hidden = positions >= lengths
    in_last_block = positions < (lengths + block_size - 1) // block_size * block_size
    sequence, position = (hidden & in_last_block).nonzero(as_tuple=True)
    heads = torch.arange(num_kv_heads, device=device)[:, None]
    key_rows = (sequence * num_kv_heads + heads) * len(positions) + position
    mask = torch.zeros(hidden.shape, dtype=kv.dtype, device=device).masked_fill_(hidden, float("-inf"))
    return _Group(
        tokens=torch.tensor([query_starts[member] for member in members], device=device),
        kv_rows=_gather_rows(kv, table),
        hidden_rows=torch.cat((key_rows, key_rows + hidden.numel() * num_kv_heads)).flatten(),
        mask=mask[:, None, None],
    )


def _gather_rows(kv: Tensor, table: Tensor) -> Tensor:
    """Return the rows of sequences' blocks, keys before values: [2 * num_seqs * num_kv_heads * num_blocks]."""
    block, _, part, head = (stride // (kv.shape[4] * kv.shape[5]) for stride in kv.stride()[:4])
    parts = torch.arange(2, device=kv.device)[:, None, None, None] * part
    heads = torch.arange(kv.shape[3], device=kv.device)[:, None] * head
    return (table.long()[:, None] * block + heads + parts).flatten()


def _write_rows(kv: Tensor, slots: Tensor) -> Tensor:
    """Return the rows that keys of tokens in `slots` go to: [num_tokens * num_kv_heads]."""
    block, _, _, head, token = (stride // kv.shape[5] for stride in kv.stride()[:5])
    first = slots // kv.shape[4] * block + slots % kv.shape[4] * token
    return (first[:, None] + torch.arange(kv.shape[3], device=kv.device) * head).flatten()


def _rows(kv: Tensor, layer: int, part: int, width: int) -> Tensor:
    """Return the memory from a layer's keys (part 0) or values (1) on, as rows of `width` elements."""
    skipped = layer * kv.stride(1) + part * kv.stride(2)
    return kv.as_strided(((kv.numel() - skipped) // width, width), (width, 1), kv.storage_offset() + skipped)


def _causal_mask(length: int, like: Tensor) -> Tensor:
    """Return [_TILE, length] where the last query sees everything, each one before it one token less."""
    length = max(length, _TILE)
    mask = torch.full((_TILE, length), float("-inf"), dtype=like.dtype, device=like.device)
    return mask.triu_(length - _TILE + 1)
