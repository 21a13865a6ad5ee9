"""Attention over a paged KV cache. Source: PagedAttention, arXiv:2309.06180.

A step is planned once, then run once a layer: what depends on the lengths of the sequences alone is not done again for
every layer. The KV cache is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, keys before values.
On a GPU the backend is Triton kernels. On a CPU a compiled kernel reads float32, bfloat16 and float16; everything else
gathers blocks and uses torch's dense attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvern.kernels.paged_attention.backends import AUTO, BACKENDS, choose_backend, load_backend
from kvern.kernels.paged_attention.step import Backend, SplitList, Step, check_kv_scales, distinct_windows

__all__ = [
    "BACKENDS",
    "AttentionMetadata",
    "SplitList",
    "allocate_split_lists",
    "choose_backend",
    "paged_attention",
    "plan_attention",
    "warm_up",
    "write_kv",
]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step lie. The same for all layers."""

    num_tokens: int
    kv_shape: torch.Size
    windows: frozenset[int | None]
    slot_mapping: Tensor
    kv_scales: Tensor | None
    is_padding: Tensor | None
    backend: Backend
    plan: object


def plan_attention(
    kv: Tensor,
    block_table: Tensor,
    cu_query_lens: Tensor,
    context_lens: Tensor,
    slot_mapping: Tensor,
    sliding_windows: Iterable[int | None] = (None,),
    *,
    backend: str = AUTO,
    max_query_len: int | None = None,
    kv_scales: Tensor | None = None,
    split_lists: Mapping[int | None, SplitList] | None = None,
    is_padding: Tensor | None = None,
) -> AttentionMetadata:
    """Prepare a step for `write_kv` and `paged_attention`.

    block_table: [num_seqs, max_blocks] int32, unused entries unread; cu_query_lens: [num_seqs + 1] int32, where each
    sequence's queries begin; context_lens: [num_seqs] int32, tokens including this step's; slot_mapping: [num_tokens]
    int64, block * block_size + offset for each token's KV, or -1 where it is in the cache already and not written;
    sliding_windows: all that layers will ask for, in tokens; repetitions are free.
    backend: one of BACKENDS. max_query_len: most query tokens of a sequence, where the host knows: if 1, which says
    that every sequence has one, no kernel for more is launched. kv_scales: [2, num_layers, num_kv_heads] float32, what
    keys and values of fp8 are multiplied by. split_lists: of `allocate_split_lists`, to be written by this step; what a
    CUDA graph reads must outlive it. is_padding: [num_tokens] bool, for whoever else must tell rows of padding.

    The backend "triton" reads nothing back from the device. Its rows of padding are those with slot -1 of sequences of
    context length 0: they get zeros, as do rows that no sequence owns.
    Raises ValueError for shapes or types that do not fit.
    """
    _check("kv", kv, 6, None)
    _check("block_table", block_table, 2, torch.int32)
    _check("cu_query_lens", cu_query_lens, 1, torch.int32)
    _check("context_lens", context_lens, 1, torch.int32)
    _check("slot_mapping", slot_mapping, 1, torch.int64)
    if not kv[0, 0, 0].is_contiguous():
        raise ValueError("a head's slice of a block must be contiguous in kv")
    if not len(block_table) == len(context_lens) == len(cu_query_lens) - 1:
        raise ValueError(
            f"{len(block_table)} block tables, {len(context_lens)} context lengths and {len(cu_query_lens) - 1} "
            "sequences of queries must be as many"
        )
    if max_query_len == 1 and len(slot_mapping) != len(context_lens):
        raise ValueError(f"{len(slot_mapping)} tokens are not one for each of {len(context_lens)} sequences")
    check_kv_scales(kv, kv_scales)
    windows = distinct_windows(sliding_windows)
    chosen = load_backend(choose_backend(kv, backend))
    step = Step(block_table, cu_query_lens, context_lens, slot_mapping, windows, max_query_len, kv_scales, split_lists)
    planned = chosen.plan(kv, step)
    return AttentionMetadata(len(slot_mapping), kv.shape, windows, slot_mapping, kv_scales, is_padding, chosen, planned)


def allocate_split_lists(
    device: torch.device, max_num_seqs: int, max_context_len: int, sliding_windows: Iterable[int | None] = (None,)
) -> Mapping[int | None, SplitList]:
    """Return memory for the decode work of any step within these bounds. Needs Triton.

    max_context_len: tokens, block_table.shape[1] * block_size of the widest table.
    """
    from kvern.kernels.paged_attention import triton_backend

    return triton_backend.allocate_split_lists(device, max_num_seqs, max_context_len, distinct_windows(sliding_windows))


def write_kv(kv: Tensor, layer: int, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> None:
    """Store the step's keys and values of one layer in the slots of the plan.

    k, v: [num_tokens, num_kv_heads, head_dim]. Raises ValueError for shapes or types that do not fit.
    """
    expected = (metadata.num_tokens, kv.shape[3], kv.shape[5])
    _check_against_plan(kv, metadata)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != expected or not _fits(tensor, kv):
            raise ValueError(f"{name} is {_describe(tensor)}; {list(expected)} of {kv.dtype} is needed")
    metadata.backend.write_kv(kv, layer, k, v, metadata.plan)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    metadata: AttentionMetadata,
    scale: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend every query token over its sequence's KV of one layer, causally. Softmax is in float32.

    q: [num_tokens, num_heads, head_dim]. Returns the same shape. The last query of a sequence is its context's last
    token. sliding_window: most tokens a query attends, its own among them, all where None. softcap: scores become
    softcap * tanh(score / softcap). Raises ValueError if num_heads % num_kv_heads != 0, for a window that was not
    planned, and for shapes or types that do not fit.
    """
    _check_against_plan(kv, metadata)
    num_kv_heads, head_dim = kv.shape[3], kv.shape[5]
    if q.dim() != 3 or len(q) != metadata.num_tokens or q.shape[2] != head_dim or not _fits(q, kv):
        raise ValueError(f"q is {_describe(q)}; [{metadata.num_tokens}, num_heads, {head_dim}] of {kv.dtype} is needed")
    if q.shape[1] % num_kv_heads:
        raise ValueError(f"{q.shape[1]} query heads cannot share {num_kv_heads} KV heads evenly")
    if sliding_window not in metadata.windows:
        raise ValueError(f"the step was not planned for a sliding window of {sliding_window}")
    return metadata.backend.paged_attention(q, kv, layer, metadata.plan, scale, sliding_window, softcap)


def warm_up(kv: Tensor) -> None:
    """Compile what steps on a CPU need, or load what was compiled before: seconds on a machine's first start.

    On a GPU kernels depend on the model's heads too, and are compiled by its first steps.
    """
    if kv.device.type != "cpu" or kv.dtype.itemsize == 1:
        return
    one = torch.zeros(1, kv.shape[3], kv.shape[5], dtype=kv.dtype, device=kv.device)
    table, starts, lens = (torch.tensor(each, dtype=torch.int32, device=kv.device) for each in ([[0]], [0, 1], [1]))
    metadata = plan_attention(kv, table, starts, lens, torch.tensor([-1], device=kv.device))
    write_kv(kv, 0, one, one, metadata)
    paged_attention(one, kv, 0, metadata, 1.0)


def _check(name: str, tensor: Tensor, dims: int, dtype: torch.dtype | None) -> None:
    if tensor.dim() != dims or (dtype is not None and tensor.dtype is not dtype):
        raise ValueError(
            f"{name} is {_describe(tensor)}; {dims} dimensions{f' of {dtype}' if dtype else ''} are needed"
        )


def _fits(tensor: Tensor, kv: Tensor) -> bool:
    """Activations are of the cache's type. Where the cache is fp8, of any two bytes, or on a CPU of four."""
    if kv.dtype.itemsize > 1:
        return tensor.dtype is kv.dtype
    on_cpu = kv.device.type == "cpu"
    return tensor.dtype in (torch.bfloat16, torch.float16) or (on_cpu and tensor.dtype is torch.float32)


def _check_against_plan(kv: Tensor, metadata: AttentionMetadata) -> None:
    if kv.shape != metadata.kv_shape:
        raise ValueError(f"kv is {list(kv.shape)}; the step was planned for {list(metadata.kv_shape)}")


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"
