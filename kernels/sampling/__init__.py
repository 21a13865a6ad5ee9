"""From logits to tokens on a GPU: edits, filters and draws, without the host.

Everything that is summed is whole numbers, so a row's token does not depend on its batch, nor on the order in which
programs run. It is the token that the same logits give on a CPU.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from kvern.kernels.sampling import weights
from kvern.kernels.sampling.weights import MAX_VOCAB_SIZE

__all__ = [
    "DrawParams",
    "EditedLogits",
    "LogitBias",
    "Penalties",
    "TokenMask",
    "count_tokens",
    "draw",
    "edit_logits",
    "greatest",
    "token_weights",
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class TokenMask:
    """What grammars allow."""

    index: Tensor
    """[num_rows] int64, which row of bits is for each row of the logits, -1 for none."""
    bits: Tensor
    """[num_masks, ceil(vocab_size / 32)] int32, bit i % 32 of word i // 32 set where token i is allowed."""


@dataclass(frozen=True, slots=True)
class LogitBias:
    """What is added to logits, -inf among it."""

    index: Tensor
    """[num_rows] int64, which row of addends is for each row of the logits, -1 for none."""
    addends: Tensor
    """[num_biases, vocab_size] float32."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """Repetition penalty over prompt and output, then frequency and presence penalty over output."""

    index: Tensor
    """[num_rows] int64, which of the rows below is for each row of the logits, -1 for none."""
    params: Tensor
    """[num_slots, 3] float32: repetition, frequency, presence."""
    in_prompt: Tensor
    """[num_slots, vocab_size] bool."""
    output_counts: Tensor
    """[num_slots, vocab_size] int32."""


@dataclass(frozen=True, slots=True)
class EditedLogits:
    """Logits to draw from."""

    logits: Tensor
    """[num_rows, vocab_size] float32."""
    is_finite: Tensor
    """[num_rows] bool. False where the logits, before any edit, hold NaN or +inf, or are all -inf."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How the requests in the slots of the persistent batch draw. All tensors: [num_slots]."""

    temperature: Tensor
    """float32. Below 1e-5: the greatest logit is taken."""
    log_min_p: Tensor
    """float32. -inf: all tokens."""
    top_k: Tensor
    """int64. 0: all tokens."""
    top_p: Tensor
    """float64. 1: all tokens."""
    seed: Tensor
    """int64, the bits of an unsigned seed."""


def edit_logits(
    logits: Tensor,
    slots: Tensor,
    mask: TokenMask | None = None,
    bias: LogitBias | None = None,
    penalties: Penalties | None = None,
) -> EditedLogits:
    """Look whether logits are numbers, then bias, mask and penalize them.

    logits: [num_rows, vocab_size], rows contiguous; float32 ones change in place, of others there is a float32 copy;
    slots: [num_rows] int64, -1 for rows that fill up a batch: they are left alone and count as finite.
    Raises ValueError for shapes, strides or types that do not fit.
    """
    _check_logits(logits, _DTYPES)
    _check_columns(len(logits), slots=slots)
    _check_edits(logits, mask, bias, penalties)
    # Imported here: a CPU does without Triton.
    from kvern.kernels.sampling.edit_kernel import launch

    out = logits
    if logits.dtype is not torch.float32:
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    return EditedLogits(out, launch(logits, out, slots, mask, bias, penalties))


def draw(logits: Tensor, slots: Tensor, output_positions: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
    """Return a token for each row, and whether any was left to choose from: [num_rows] int64 and bool.

    logits: [num_rows, vocab_size] float32, rows contiguous; slots: [num_rows] int64, the row of params for each row, -1
    for rows that fill up a batch; output_positions: [num_rows] int64, how many tokens were output before this one.
    Temperature, then min_p, top_k and top_p, then one draw from what is left. Of equal logits the lowest id counts as
    the greater. Where logits are not finite, or none is left, the token is some id.
    Raises ValueError for shapes, strides or types that do not fit.
    """
    _check_logits(logits, (torch.float32,))
    _check_columns(len(logits), slots=slots, output_positions=output_positions)
    # Imported here: a CPU does without Triton.
    from kvern.kernels.sampling.kernel import launch

    return launch(logits, slots, output_positions, params)


def count_tokens(penalties: Penalties, token_ids: Tensor) -> None:
    """Take in the tokens drawn for the rows that are penalized. token_ids: [num_rows] int64."""
    from kvern.kernels.sampling.edit_kernel import launch_count

    _check_columns(len(token_ids), index=penalties.index, token_ids=token_ids)
    launch_count(penalties, token_ids)


def greatest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's greatest logit, NaN where it holds one, and the lowest id that has it. logits: float32."""
    if logits.device.type == "cpu":
        with suppress(ModuleNotFoundError):  # where there is a GPU, numba need not be installed
            from kvern.kernels.sampling import cpu

            return cpu.greatest(logits)
    best, token_ids = logits.max(dim=-1)
    return best, token_ids


def token_weights(scaled: Tensor) -> Tensor:
    """Return probabilities as whole numbers, relative to the greatest: int64. scaled: as in `weights`."""
    if scaled.device.type == "cpu":
        # Imported here: where there is a GPU, numba need not be installed.
        from kvern.kernels.sampling import cpu

        return cpu.token_weights(scaled)
    return weights.token_weights(scaled)


def _check_logits(logits: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if logits.dim() != 2 or logits.dtype not in dtypes or logits.stride(1) != 1:
        raise ValueError(f"logits are {_describe(logits)}; 2 dimensions of {dtypes} are needed, rows contiguous")
    if logits.shape[1] > MAX_VOCAB_SIZE:
        raise ValueError(f"logits are of {logits.shape[1]} tokens; at most {MAX_VOCAB_SIZE} can be weighed")


def _check_columns(num_rows: int, **columns: Tensor) -> None:
    for name, column in columns.items():
        if column.shape != (num_rows,) or column.dtype is not torch.int64 or not column.is_contiguous():
            raise ValueError(f"{name}: {_describe(column)}; contiguous [{num_rows}] of torch.int64 is needed")


def _check_edits(logits: Tensor, mask: TokenMask | None, bias: LogitBias | None, penalties: Penalties | None) -> None:
    num_rows, vocab_size = logits.shape
    if mask is not None:
        _check_columns(num_rows, mask_index=mask.index)
        _check_table("mask bits", mask.bits, -(-vocab_size // 32), torch.int32)
    if bias is not None:
        _check_columns(num_rows, bias_index=bias.index)
        _check_table("bias addends", bias.addends, vocab_size, torch.float32)
    if penalties is not None:
        _check_columns(num_rows, penalty_index=penalties.index)
        _check_table("penalty params", penalties.params, 3, torch.float32)
        _check_table("in_prompt", penalties.in_prompt, vocab_size, torch.bool)
        _check_table("output_counts", penalties.output_counts, vocab_size, torch.int32)


def _check_table(name: str, table: Tensor, width: int, dtype: torch.dtype) -> None:
    if table.dim() != 2 or table.shape[1] != width or table.dtype is not dtype or not table.is_contiguous():
        raise ValueError(f"{name}: {_describe(table)}; contiguous [rows, {width}] of {dtype} is needed")


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"
