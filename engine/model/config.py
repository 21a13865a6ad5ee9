"""What a model's files say of its shape, whatever their format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from kvern.engine.errors import ModelError


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every rotary frequency divided by the factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow frequencies divided by the factor. Source: the Llama 3.1 release."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Frequencies divided by the factor, less so the faster they are. Source: YaRN, arXiv:2309.00071."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the bounds of the ramp are whole dimensions."""


@dataclass(frozen=True, slots=True)
class DivisorScaling:
    """Each frequency divided by a number of its own."""

    divisors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each frequency divided by a number of its own, from one list or the other. Source: LongRoPE, arXiv:2402.13753."""

    short_divisors: tuple[float, ...]
    long_divisors: tuple[float, ...]
    original_max_position_embeddings: int
    """Tokens that the short divisors are for."""
    is_long: bool
    """Which list is used, for every request: see `for_served_length`."""

    @property
    def divisors(self) -> tuple[float, ...]:
        return self.long_divisors if self.is_long else self.short_divisors


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float
    rotary_dim: int
    """Dimensions of each head, from the first on, that are rotated."""
    scaling: LinearScaling | Llama3Scaling | YarnScaling | DivisorScaling | LongRopeScaling | None = None
    """How frequencies are stretched for contexts longer than the model's first training."""
    attention_factor: float = 1.0
    """What rotated queries and keys are multiplied by."""


class Activation(Enum):
    """Of an MLP's gate, by transformers' names."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Layers whose MLP is a mixture of experts."""

    layers: frozenset[int]
    num_experts: int
    top_k: int
    """Experts a token."""
    intermediate_size: int
    norm_topk_prob: bool
    """Whether the weights of a token's experts add up to 1."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the engine must know of a model, whoever computes it."""

    architecture: str
    """Hugging Face's name of the class, for instance LlamaForCausalLM."""
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Tokens the model was trained for."""
    sliding_windows: tuple[int | None, ...]
    """Of each layer: most tokens that one attends, its own among them. None: all."""


@dataclass(frozen=True, slots=True)
class ModelConfig(ModelShape):
    """The shape of a decoder-only transformer in Llama's frame, and where it differs from Llama."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    rms_norm_eps: float
    ropes: tuple[RopeConfig | None, ...]
    """Of each layer. None: positions are not encoded."""
    attention_scale: float
    """What scores are multiplied by."""
    tie_word_embeddings: bool
    """Whether the head is the embedding."""
    activation: Activation = Activation.SILU
    attention_bias: bool = False
    """On queries, keys and values."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head's query and key are normalized before they are rotated."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sandwich_norms: bool = False
    """Whether attention and MLP are also normalized on their way out."""
    unit_offset_norms: bool = False
    """Whether a norm's weight is stored as what it differs from 1."""
    embedding_scale: float = 1.0
    fused_weights: bool = False
    """Whether checkpoints store queries, keys and values as one tensor, and an MLP's gate and up as another."""
    experts: ExpertsConfig | None = None
    fp8_weights: bool = False
    """Whether layers' projections are in float8_e4m3fn, with a scale for each output."""
    integer_bits: int | None = None
    """8 or 4: layers' projections are in so many, with a scale for each group of inputs. None: they are not."""


def for_served_length(config: ModelConfig, max_model_len: int | None) -> ModelConfig:
    """Return `config` with LongRoPE's divisors chosen for requests of up to `max_model_len` tokens. None: as trained.

    KV that is kept must not depend on how long its sequence will become. So the choice is made once, as in vLLM: the
    long divisors for every request if one may exceed the original length, else the short ones. transformers chooses in
    each forward by the tokens it is given: it agrees on every prompt beyond the original length, and on shorter ones
    where none longer is served, but not on a short prompt where longer ones are.
    """
    if max_model_len is None:
        return config
    return replace(config, ropes=tuple(_rope_for_served_length(rope, max_model_len) for rope in config.ropes))


def _rope_for_served_length(rope: RopeConfig | None, max_model_len: int) -> RopeConfig | None:
    if rope is None or not isinstance(rope.scaling, LongRopeScaling):
        return rope
    is_long = max_model_len > rope.scaling.original_max_position_embeddings
    return replace(rope, scaling=replace(rope.scaling, is_long=is_long))


def checked(config: ModelConfig, source: str) -> ModelConfig:
    """Return `config` if its numbers agree with each other, else raise ModelError."""
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{source}: {config.num_heads} attention heads cannot share {config.num_kv_heads} KV heads evenly"
        )
    for rope in set(config.ropes) - {None}:
        assert rope is not None
        if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= config.head_dim:
            raise ModelError(
                f"{source}: {rope.rotary_dim} of a head of {config.head_dim} dimensions cannot be rotated in pairs"
            )
    if config.experts is not None and config.experts.top_k > config.experts.num_experts:
        raise ModelError(
            f"{source}: {config.experts.top_k} experts a token are more than the {config.experts.num_experts} there are"
        )
    return config
