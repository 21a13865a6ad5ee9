"""Scales of keys and values in an fp8 cache."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kvern.engine.errors import ModelError
from kvern.engine.model.checkpoint import Checkpoint
from kvern.engine.model.config import ModelShape

logger = logging.getLogger(__name__)

_NAMES = ("self_attn.{part}_scale", "self_attn.{part}_proj.{part}_scale", "self_attn.attn.{part}_scale")
"""Of published checkpoints, beside a layer's name."""


def read_kv_scales(checkpoint: Checkpoint, shape: ModelShape) -> Tensor:
    """Return what keys and values are divided by as they are stored: [2, num_layers, num_kv_heads] float32.

    A checkpoint has one number a layer, or one a head. Where it has none, 1.0 is used, and a warning says so. Raises
    ModelError for numbers that nothing can be divided by.
    """
    scales = torch.ones(2, shape.num_layers, shape.num_kv_heads)
    missing = 0
    for layer in range(shape.num_layers):
        for place, part in enumerate("kv"):
            name = _find(checkpoint, f"model.layers.{layer}.", part)
            if name is None:
                missing += 1
            else:
                scales[place, layer] = _read(checkpoint, name, shape.num_kv_heads)
    if missing:
        logger.warning(
            "%s: %d of %d scales for an fp8 KV cache (k_scale, v_scale) are not in the checkpoint; 1.0 is used, which "
            "loses accuracy where keys or values are large or small",
            checkpoint.path,
            missing,
            2 * shape.num_layers,
        )
    return scales


def _find(checkpoint: Checkpoint, prefix: str, part: str) -> str | None:
    names = (prefix + name.format(part=part) for name in _NAMES)
    return next((name for name in names if name in checkpoint), None)


def _read(checkpoint: Checkpoint, name: str, num_kv_heads: int) -> Tensor:
    scales = checkpoint.tensor(name).to(torch.float32).flatten()
    if len(scales) not in (1, num_kv_heads):
        raise ModelError(
            f"{checkpoint.path}: tensor {name} has {len(scales)} numbers; one, or one for each of {num_kv_heads} KV "
            "heads, is needed"
        )
    if not bool((scales > 0).all() and scales.isfinite().all()):
        raise ModelError(f"{checkpoint.path}: tensor {name} has a scale that is not above 0 and finite")
    return scales
