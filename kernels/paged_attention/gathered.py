"""Paged attention in torch: gather a sequence's blocks, then dense attention.

Sequences with one query token are batched, those of like context length together, so that little is padded. Longer
runs of queries go one sequence at a time, in tiles. Blocks may hold anything, NaN too, past a sequence's context.
KV in fp8 is attended in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from kvern.kernels.paged_attention.step import Step

_TILE = 128
"""Most queries of one chunk attended together: bounds the mask, and skips most of what causality hides."""

_MAX_PADDING = 1.5
"""Longest context of a group over its shortest, in blocks."""

_GROUP_BYTES = 4 << 20
"""Most KV gathered for one group: what a processor's caches hold between gathering and attending."""

_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0


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
class _Reach:
    """A step's sequences, cut to what one sliding window lets them attend."""

    groups: tuple[_Group, ...]
    chunks: tuple[_Chunk, ...]
    mask: Tensor
    """[_TILE, longest context of a chunk], 0 or -inf: of any tile, the mask is the lower right corner."""
    window: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A step, ready to run for any layer. Rows count from the layer's first element on."""

    written: Tensor | None
    """Tokens whose KV is stored. None: all."""
    write_rows: Tensor
    """[num_written * num_kv_heads] rows of head_dim elements that the keys go to."""
    reaches: dict[int | None, _Reach]
    """By sliding window."""
    workspace: Tensor
    """[rows, block_size * head_dim] for what is gathered. One allocation a step: fresh memory costs page faults."""
    kv_scales: Tensor | None
    """[2, num_layers, num_kv_heads], of KV in fp8."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What is the same for all sequences of one layer."""

    rows: Tensor
    """The layer's memory in rows of block_size * head_dim elements."""
    workspace: Tensor
    num_kv_heads: int
    scale: float
    softcap: float | None
    kv_scales: Tensor | None
    """[2, 1, num_kv_heads, 1, 1], of KV in fp8."""

    def gather(self, kv_rows: Tensor) -> Tensor:
        gathered = torch.index_select(self.rows, 0, kv_rows, out=self.workspace[: len(kv_rows)])
        return gathered if self.kv_scales is None else gathered.view(_FP8).to(torch.float32)

    def scaled(self, gathered: Tensor) -> Tensor:
        """gathered: [2, num_seqs, num_kv_heads, num_keys, head_dim]. Returns keys and values as they were written."""
        return gathered if self.kv_scales is None else gathered * self.kv_scales


def plan(kv: Tensor, step: Step) -> Plan:
    """Prepare a step. Waits for the device, as shapes depend on the lengths."""
    query_starts, context_lens, slot_mapping = (
        step.cu_query_lens.tolist(),
        step.context_lens.tolist(),
        step.slot_mapping,
    )
    written = None if bool((slot_mapping >= 0).all()) else (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping if written is None else slot_mapping[written]
    reaches = {window: _plan_reach(kv, step.block_table, query_starts, context_lens, window) for window in step.windows}
    gathered = [group.kv_rows for reach in reaches.values() for group in reach.groups]
    gathered += [chunk.kv_rows for reach in reaches.values() for chunk in reach.chunks]
    return Plan(
        written=written,
        write_rows=_write_rows(kv, slots),
        reaches=reaches,
        workspace=_bytes_of_fp8(kv).new_empty(max(map(len, gathered)), kv.shape[4] * kv.shape[5]),
        kv_scales=step.kv_scales,
    )


def _plan_reach(
    kv: Tensor, block_table: Tensor, query_starts: list[int], context_lens: list[int], window: int | None
) -> _Reach:
    """Plan for one window. Blocks that no query of a sequence reaches are left out, as if its context began later."""
    block_size = kv.shape[4]
    first_blocks = [0] * len(context_lens)
    if window is not None:
        for sequence, length in enumerate(context_lens):
            first_query = length - (query_starts[sequence + 1] - query_starts[sequence])
            first_blocks[sequence] = max(0, first_query - window + 1) // block_size
        context_lens = [length - first * block_size for length, first in zip(context_lens, first_blocks, strict=True)]
    blocks = [-(-length // block_size) for length in context_lens]
    decodes, chunks = [], []
    for sequence, (begin, end) in enumerate(pairwise(query_starts)):
        if end - begin == 1:
            decodes.append(sequence)
        else:
            first = first_blocks[sequence]
            table = block_table[sequence : sequence + 1, first : first + blocks[sequence]]
            chunks.append(_Chunk(begin, end, context_lens[sequence], _gather_rows(kv, table)))
    groups = tuple(
        _plan_group(kv, block_table, members, query_starts, context_lens, first_blocks, window)
        for members in _alike(decodes, blocks, kv[0, 0].numel() * kv.element_size())
    )
    longest = max((chunk.context_len for chunk in chunks), default=_TILE)
    return _Reach(groups, tuple(chunks), _causal_mask(longest, window, kv), window)


def write_kv(kv: Tensor, layer: int, k: Tensor, v: Tensor, plan: Plan) -> None:
    """Store the step's keys and values of one layer."""
    head_dim = kv.shape[5]
    if plan.written is not None:
        k, v = k[plan.written], v[plan.written]
    for part, values in enumerate((k, v)):
        stored = values if plan.kv_scales is None else _to_fp8(values, plan.kv_scales[part, layer])
        rows = _rows(_bytes_of_fp8(kv), layer, part, head_dim)
        rows.index_copy_(0, plan.write_rows, _bytes_of_fp8(stored).reshape(-1, head_dim))


def paged_attention(
    q: Tensor, kv: Tensor, layer: int, plan: Plan, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attend one layer. Shapes as in the launcher."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows = _rows(_bytes_of_fp8(kv), layer, 0, plan.workspace.shape[1])
    scales = None if plan.kv_scales is None else plan.kv_scales[:, layer][:, None, :, None, None]
    call = _Call(rows, plan.workspace, kv.shape[3], scale, softcap, scales)
    reach = plan.reaches[window]
    for group in reach.groups:
        _attend_group(q, group, call, out)
    for chunk in reach.chunks:
        _attend_chunk(q, chunk, reach, call, out)
    return out


def _attend_group(q: Tensor, group: _Group, call: _Call, out: Tensor) -> None:
    """Query heads that share a KV head stand as queries of that head."""
    size, num_heads, head_dim = len(group.tokens), q.shape[1], q.shape[2]
    gathered = call.gather(group.kv_rows).view(-1, head_dim)
    gathered.index_fill_(0, group.hidden_rows, 0)
    keys, values = call.scaled(gathered.view(2, size, call.num_kv_heads, -1, head_dim))
    queries = q.index_select(0, group.tokens).view(size, call.num_kv_heads, -1, head_dim)
    attended = _attend(queries.to(keys.dtype), keys, values, group.mask, call)
    out.index_copy_(0, group.tokens, attended.reshape(size, num_heads, head_dim).to(out.dtype))


def _attend_chunk(q: Tensor, chunk: _Chunk, reach: _Reach, call: _Call, out: Tensor) -> None:
    """Each tile of queries sees the context from what its first token reaches up to its own last token."""
    keys, values = call.scaled(call.gather(chunk.kv_rows).view(2, 1, call.num_kv_heads, -1, q.shape[2]))
    for begin in range(chunk.begin, chunk.end, _TILE):
        end = min(begin + _TILE, chunk.end)
        last = chunk.context_len - (chunk.end - end)
        first = 0 if reach.window is None else max(0, last - (end - begin) - reach.window + 1)
        mask = reach.mask[begin - end :, first - last :]
        queries = q[begin:end].transpose(0, 1)[None].to(keys.dtype)
        attended = _attend(queries, keys[:, :, first:last], values[:, :, first:last], mask, call)
        out[begin:end] = attended[0].transpose(0, 1)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, call: _Call) -> Tensor:
    """Return softmax(queries @ keys * scale + mask) @ values, scores capped where there is a cap.

    queries: [batch, num_heads, num_queries, head_dim]; keys, values: [batch, num_kv_heads, num_keys, head_dim];
    mask: what broadcasts to [batch, num_heads, num_queries, num_keys].
    """
    if call.softcap is None:
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=call.scale, enable_gqa=queries.shape[1] != keys.shape[1]
        )
    size, num_heads, num_queries, head_dim = queries.shape
    grouped = queries.reshape(size, keys.shape[1], -1, head_dim)
    products = (grouped @ keys.transpose(-1, -2)).to(torch.float32)
    scores = products.mul_(call.scale / call.softcap).tanh_().mul_(call.softcap)
    weights = (scores.view(size, num_heads, num_queries, -1) + mask).softmax(dim=-1).to(values.dtype)
    return (weights.view(products.shape) @ values).view(queries.shape)


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
    kv: Tensor,
    block_table: Tensor,
    members: list[int],
    query_starts: list[int],
    context_lens: list[int],
    first_blocks: list[int],
    window: int | None,
) -> _Group:
    device, (num_kv_heads, block_size) = kv.device, kv.shape[3:5]
    lengths, first = torch.tensor(
        [[context_lens[member] for member in members], [first_blocks[member] for member in members]], device=device
    )[..., None]
    num_blocks = -(-context_lens[members[0]] // block_size)
    positions = torch.arange(num_blocks * block_size, device=device)
    columns = torch.where(positions[::block_size] < lengths, first + torch.arange(num_blocks, device=device), first)
    table = block_table[torch.tensor(members, device=device)[:, None], columns]
    past = positions >= lengths
    in_last_block = positions < (lengths + block_size - 1) // block_size * block_size
    sequence, position = (past & in_last_block).nonzero(as_tuple=True)
    heads = torch.arange(num_kv_heads, device=device)[:, None]
    key_rows = (sequence * num_kv_heads + heads) * len(positions) + position
    hidden = past if window is None else past | (positions < lengths - window)
    mask = torch.zeros(hidden.shape, dtype=_attended_dtype(kv), device=device).masked_fill_(hidden, float("-inf"))
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


def _causal_mask(length: int, window: int | None, like: Tensor) -> Tensor:
    """Return [_TILE, length] where the last query sees everything in its window, each one before it one token less."""
    length = max(length, _TILE)
    mask = torch.full((_TILE, length), float("-inf"), dtype=_attended_dtype(like), device=like.device)
    future = mask.triu(length - _TILE + 1)
    return future if window is None else future + mask.tril(length - _TILE - window)


def _attended_dtype(kv: Tensor) -> torch.dtype:
    return torch.float32 if kv.dtype is _FP8 else kv.dtype


def _to_fp8(values: Tensor, scales: Tensor) -> Tensor:
    """values: [num_tokens, num_kv_heads, head_dim]; scales: [num_kv_heads]."""
    return (values.to(torch.float32) / scales[:, None]).clamp_(-_FP8_MAX, _FP8_MAX).to(_FP8)


def _bytes_of_fp8(tensor: Tensor) -> Tensor:
    """Return fp8 as bytes, which torch can gather and store on a CPU; other types as they are."""
    return tensor.view(torch.uint8) if tensor.dtype is _FP8 else tensor
