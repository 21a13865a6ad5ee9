"""Weights in 8 or 4 bits on a CPU: which layers hold them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kvern.engine.errors import ConfigError
from kvern.engine.model.causal_lm import CausalLM
from kvern.engine.model.config import ModelConfig
from kvern.engine.model.layers import Linear
from kvern.kernels.linear.groups import GROUP, in_4_bits, in_8_bits

INTEGER_BITS = {"int8": 8, "int4": 4}


def with_integers(config: ModelConfig, name: str, device: torch.device) -> ModelConfig:
    """Return `config` with its weights in int8 or int4. Raises ConfigError."""
    if device.type != "cpu":
        raise ConfigError("quantization", f"{name} is for a CPU; a GPU computes fp8")
    if config.experts is not None:
        raise ConfigError("quantization", f"the experts of a {config.architecture} cannot be in {name}")
    if config.fp8_weights:
        raise ConfigError("quantization", f"the checkpoint's weights are in fp8; they are not rounded again, to {name}")
    return replace(config, integer_bits=INTEGER_BITS[name])


def check_sizes(module: CausalLM, bits: int) -> None:
    """Raise ConfigError where a layer's inputs are no whole number of groups. Weights need not be filled in."""
    for layer in _linears(module):
        out_features, in_features = layer.weight.shape
        if in_features % GROUP:
            sizes = f"a layer of {in_features} inputs and {out_features} outputs"
            raise ConfigError("quantization", f"{sizes} cannot be in int{bits}, where inputs must divide by {GROUP}")


def pack_integers(module: CausalLM, bits: int) -> None:
    """Round the layers' projections to 8 or 4 bits, one at a time, and the head to 8: what it says counts most."""
    # Imported here: it needs numba, which a machine with a GPU may lack.
    from kvern.kernels.linear.integer import IntegerWeight

    for layer in _linears(module):
        if bits == 4 and layer is not module.lm_head:
            layer.pack(lambda weight: IntegerWeight(in_4_bits(weight)))
        else:
            layer.pack(lambda weight: IntegerWeight(in_8_bits(weight)))


def _linears(module: CausalLM) -> Iterator[Linear]:
    return (layer for layer in module.modules() if isinstance(layer, Linear))
