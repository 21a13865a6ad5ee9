"""What a model's files say of its shape, whatever their format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvern.engine.errors import ModelError


class RopeScaling(Enum):
    """How rotary frequencies are stretched for contexts longer than the model's first training."""

    NONE = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    DIVISORS = "divisors"
    """Each frequency divided by a number of its own, as a GGUF stores llama3's scaling."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Fields below `scaling` have a meaning for some of its values only."""

    theta: float
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer."""

    architecture: str
    """Hugging Face's name of the class, for instance LlamaForCausalLM."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    """Tokens the model was trained for."""
    tie_word_embeddings: bool
    """Whether the head is the embedding."""
    attention_bias: bool = False
    mlp_bias: bool = False


class Fields:
    """Typed access to metadata read from a file. Raises ModelError naming file and field."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number above zero."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(name, f"{value!r} is not a whole number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above zero."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(name, f"{value!r} is not a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a boolean. An absent one is false."""
        value = self._values.get(name) or False
        if not isinstance(value, bool):
            raise self.error(name, f"{value!r} is neither true nor false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"{value!r} is not a string")
        return value

    def error(self, name: str, message: str) -> ModelError:
        return ModelError(f"{self._source}: {name}: {message}")

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self._source}: {name} is missing")
        return default


def checked(config: ModelConfig, source: str) -> ModelConfig:
    """Return `config` if its numbers agree with each other, else raise ModelError."""
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{source}: {config.num_heads} attention heads cannot share {config.num_kv_heads} KV heads evenly"
        )
    if config.head_dim % 2:
        raise ModelError(f"{source}: a head of {config.head_dim} dimensions cannot be rotated in pairs")
    return config
