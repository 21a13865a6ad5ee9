"""What a config.json says of how weights are stored in fewer bits. fp8 with a scale for each tensor or output is read.

Two forms are published: quant_method "fp8" (vLLM's own), and "compressed-tensors" (llm-compressor's).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvern.engine.errors import ModelError

_FIELD = "quantization_config"
_HEAD = {"lm_head", "re:.*lm_head"}
_STRATEGIES = ("tensor", "channel")


def has_fp8_weights(raw: Mapping[str, Any], source: str) -> bool:
    """Return whether projections are stored in fp8. Raises ModelError for quantization of any other kind.

    How activations are to be rounded is not looked at: here each token has a scale of its own.
    """
    quantization = raw.get(_FIELD)
    if quantization is None:
        return False
    reason = _obstacle(quantization) if isinstance(quantization, dict) else "is no object"
    if reason is not None:
        raise ModelError(
            f"{source}: {_FIELD}: {reason}; quantized checkpoints are not supported, except fp8 with a scale for each "
            "tensor or output, and .gguf files"
        )
    return True


def _obstacle(quantization: Mapping[str, Any]) -> str | None:
    method = quantization.get("quant_method")
    kept = set(quantization.get("ignore") or quantization.get("modules_to_not_convert") or ())
    if method == "fp8":
        if quantization.get("weight_block_size") is not None:
            return "weight_block_size: scales of blocks"
    elif method == "compressed-tensors":
        groups = quantization.get("config_groups") or {}
        if not groups or not all(_is_fp8_group(group) for group in groups.values()):
            return "config_groups: weights that are not fp8"
    else:
        return f"quant_method {method!r}"
    if kept - _HEAD:
        return f"layers beside the head that are not quantized ({', '.join(sorted(kept - _HEAD)[:3])})"
    return None


def _is_fp8_group(group: Any) -> bool:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return False
    is_fp8 = weights.get("type") == "float" and weights.get("num_bits") == 8
    return is_fp8 and weights.get("strategy") in _STRATEGIES and weights.get("symmetric", True) is True
