"""Weights in fp8: as a checkpoint stores them, or rounded as they are read."""

from __future__ import annotations

import torch
from torch import Tensor

from kvern.engine.errors import ModelError
from kvern.engine.model.checkpoint import Checkpoint
from kvern.kernels.fp8_linear import FP8, quantize_rows


def scale_name(weight: str) -> str:
    """Return the name of a weight's scales, here and in published checkpoints."""
    return f"{weight}_scale"


def is_scale(name: str) -> bool:
    """Whether a parameter is a weight's scales."""
    return name.endswith(".weight_scale")


def to_fp8(weight: Tensor, name: str, checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
    """Return [out, in] float8_e4m3fn, and [out, 1] float32 that it is to be multiplied by. Raises ModelError.

    A weight of another type is rounded. Stored scales are one for each output, or one for all.
    """
    if weight.dtype is not FP8:
        return quantize_rows(weight)
    scales = checkpoint.tensor(scale_name(name)).to(torch.float32)
    if scales.numel() not in (1, len(weight)):
        raise ModelError(
            f"{checkpoint.path}: tensor {scale_name(name)} is {list(scales.shape)}; one number, or one for each of "
            f"{len(weight)} outputs, is needed"
        )
    return weight, scales.reshape(-1, 1).expand(len(weight), 1)
