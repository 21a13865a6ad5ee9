"""Paged attention on a GPU: launches of the Triton kernels. Nothing is read back, so a CUDA graph may hold it all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvern.kernels import target
from kvern.kernels.paged_attention.configurations import SPLIT, decode_configuration, prefill_configuration
from kvern.kernels.paged_attention.decode_kernel import combine_kernel, decode_kernel
from kvern.kernels.paged_attention.kernel import list_splits_kernel, write_kv_kernel
from kvern.kernels.paged_attention.prefill_kernel import prefill_kernel
from kvern.kernels.paged_attention.step import SplitList, Step

_NO_WINDOW = 2**31 - 1
_LEAST_FP8_ARCHITECTURE = 90
_COMBINED_SPLITS = 16
_LISTED_ITEMS = 128


@dataclass(frozen=True, slots=True)
class Plan:
    """A step, ready to run for any layer."""

    step: Step
    split_lists: dict[int | None, SplitList]


def allocate_split_lists(
    device: torch.device, max_num_seqs: int, max_context_len: int, windows: Iterable[int | None]
) -> dict[int | None, SplitList]:
    """Return device memory for the work lists of any step within these bounds."""
    num_items = _count_items(max_num_seqs, max_context_len)
    return {
        window: SplitList(
            torch.empty(max_num_seqs + 1, dtype=torch.int32, device=device),
            torch.empty(num_items, 2, dtype=torch.int32, device=device),
        )
        for window in windows
    }


def plan(kv: Tensor, step: Step) -> Plan:
    """List the decode work of a step, on the device.

    Raises ValueError for memory that is too small, and for fp8 on a GPU that has none.
    """
    if step.kv_scales is not None and target.architecture() < _LEAST_FP8_ARCHITECTURE:
        raise ValueError(f"fp8 KV needs compute capability 9.0; this GPU has {target.architecture() / 10}")
    num_seqs, max_context_len = len(step.context_lens), step.block_table.shape[1] * kv.shape[4]
    lists = step.split_lists
    if lists is None:
        lists = allocate_split_lists(kv.device, num_seqs, max_context_len, step.windows)
    needed = {window: lists[window] for window in step.windows}
    for window, splits in needed.items():
        _list_splits(step, window, splits, max_context_len)
    return Plan(step, needed)


def write_kv(kv: Tensor, layer: int, k: Tensor, v: Tensor, plan: Plan) -> None:
    """Store the step's keys and values of one layer, in fp8 divided by their scales."""
    _check_rows(k=k, v=v)
    memory, scales = kv[:, layer], plan.step.kv_scales
    num_tokens, num_heads, head_dim = k.shape
    write_kv_kernel[(num_tokens,)](
        k,
        v,
        memory,
        None if scales is None else scales[:, layer],
        plan.step.slot_mapping,
        *k.stride()[:2],
        *v.stride()[:2],
        *memory.stride()[:3],
        0 if scales is None else scales.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv.shape[4],
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
        HAS_SCALES=scales is not None,
        num_warps=4,
    )


def paged_attention(
    q: Tensor, kv: Tensor, layer: int, plan: Plan, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attend one layer: sequences of one query token in splits, others in tiles. Shapes as in the launcher.

    Rows that no sequence owns, and those of sequences whose context is empty, are zeros.
    """
    _check_rows(q=q)
    decodes_only = plan.step.max_query_len == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not decodes_only:
        out.zero_()
    call = _Call(q, kv[:, layer], out, plan, layer, scale, window, softcap)
    _launch_decode(call)
    if not decodes_only:
        _launch_prefill(call)
    return out


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's attention."""

    q: Tensor
    kv: Tensor
    """[num_blocks, 2, num_kv_heads, block_size, head_dim]."""
    out: Tensor
    plan: Plan
    layer: int
    scale: float
    window: int | None
    softcap: float | None

    @property
    def scales(self) -> Tensor | None:
        scales = self.plan.step.kv_scales
        return None if scales is None else scales[:, self.layer]

    def runtime_arguments(self) -> dict[str, object]:
        """What both kernels are told in numbers. Scores are in base 2; capped ones are scaled within tanh."""
        inner, outer = (0.0, self.scale) if self.softcap is None else (self.scale / self.softcap, self.softcap)
        return {
            "num_seqs": len(self.plan.step.context_lens),
            "window": _NO_WINDOW if self.window is None else self.window,
            "inner_scale": inner,
            "outer_scale": outer * math.log2(math.e),
            "stride_qm": self.q.stride(0),
            "stride_qh": self.q.stride(1),
            "stride_block": self.kv.stride(0),
            "stride_part": self.kv.stride(1),
            "stride_head": self.kv.stride(2),
            "stride_scale": 0 if self.scales is None else self.scales.stride(0),
            "stride_table": self.plan.step.block_table.stride(0),
        }

    def constants(self) -> dict[str, object]:
        """What both kernels are compiled for."""
        _, _, num_kv_heads, block_size, head_dim = self.kv.shape
        return {
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": self.q.shape[1] // num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
            "COMPUTE_DTYPE": target.compute_dtype(self.kv.dtype),
            "PRECISION": "ieee",
            "HAS_SOFTCAP": self.softcap is not None,
            "HAS_SCALES": self.scales is not None,
        }


def _launch_decode(call: _Call) -> None:
    q, step, splits = call.q, call.plan.step, call.plan.split_lists[call.window]
    num_heads, num_kv_heads, head_dim = q.shape[1], call.kv.shape[2], q.shape[2]
    num_items = _count_items(len(step.context_lens), step.block_table.shape[1] * call.kv.shape[3])
    configuration = decode_configuration(target.architecture(), call.kv.element_size(), head_dim)
    partial = torch.empty(num_items, num_heads, head_dim, dtype=torch.float32, device=q.device)
    logsum = torch.empty(num_items, num_heads, dtype=torch.float32, device=q.device)
    num_programs = target.num_multiprocessors() * configuration.programs_per_multiprocessor
    decode_kernel[(min(num_programs, num_items * num_kv_heads),)](
        q,
        call.kv,
        call.scales,
        partial,
        logsum,
        step.block_table,
        step.cu_query_lens,
        step.context_lens,
        splits.starts,
        splits.items,
        **call.runtime_arguments(),
        **call.constants(),
        SPLIT=SPLIT,
        BLOCK_G=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        BLOCK_N=configuration.block_n,
        num_warps=configuration.num_warps,
        num_stages=configuration.num_stages,
    )
    combine_kernel[(len(step.context_lens), num_heads)](
        partial,
        logsum,
        call.out,
        step.cu_query_lens,
        splits.starts,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_S=_COMBINED_SPLITS,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def _launch_prefill(call: _Call) -> None:
    q, step, num_kv_heads = call.q, call.plan.step, call.kv.shape[2]
    group = q.shape[1] // num_kv_heads
    configuration = prefill_configuration(target.architecture(), call.kv.element_size(), q.shape[2])
    block_m = max(configuration.block_m, triton.next_power_of_2(group))
    prefill_kernel[(len(q) // (block_m // group) + len(step.context_lens), num_kv_heads)](
        q,
        call.kv,
        call.scales,
        call.out,
        step.block_table,
        step.cu_query_lens,
        step.context_lens,
        **call.runtime_arguments(),
        **call.constants(),
        BLOCK_M=block_m,
        BLOCK_N=configuration.block_n,
        HAS_WINDOW=call.window is not None,
        num_warps=configuration.num_warps,
        num_stages=configuration.num_stages,
    )


def _list_splits(step: Step, window: int | None, splits: SplitList, max_context_len: int) -> None:
    num_seqs = len(step.context_lens)
    if len(splits.starts) <= num_seqs or len(splits.items) < _count_items(num_seqs, max_context_len):
        raise ValueError(
            f"the split list holds {len(splits.starts) - 1} sequences and {len(splits.items)} items; "
            f"{num_seqs} sequences of up to {max_context_len} tokens do not fit"
        )
    list_splits_kernel[(num_seqs,)](
        step.cu_query_lens,
        step.context_lens,
        splits.starts,
        splits.items,
        num_seqs,
        _NO_WINDOW if window is None else window,
        SPLIT=SPLIT,
        BLOCK_SEQS=max(256, triton.next_power_of_2(num_seqs)),
        BLOCK_ITEMS=_LISTED_ITEMS,
        num_warps=4,
    )


def _count_items(num_seqs: int, max_context_len: int) -> int:
    """Return the most items of any step within these bounds."""
    return num_seqs * -(-max_context_len // SPLIT)


def _check_rows(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"a head's row must be contiguous in {name}; its strides are {tensor.stride()}")
