"""transformers' own code for architectures that Kvern does not compute itself, with paged attention plugged in.

transformers lets an attention function be registered by name. Ours writes keys and values to the paged KV cache and
attends over it. What a model does beyond that (its norms, its positions, its head) stays transformers' business; what
mixes tokens in any other way cannot be served, and a trial at loading finds it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvern.engine.errors import ModelError
from kvern.engine.model.config import ModelShape
from kvern.engine.model.language_model import LanguageModel
from kvern.engine.model.safetensors_checkpoint import SafetensorsCheckpoint
from kvern.kernels.paged_attention import AttentionMetadata, paged_attention, plan_attention, write_kv

_ATTENTION = "kvern_paged"
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_ROPES_BY_LENGTH = {"dynamic", "longrope"}
_TRIAL_PIECES = (6, 4, 1)
_TRIAL_BLOCK_SIZE = 4
_TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Norm of the logits' difference over their norm."""


@dataclass(frozen=True, slots=True)
class LoadedWithTransformers:
    module: LanguageModel
    shape: ModelShape
    identity: str
    """All that the output depends on beside the weights."""
    surplus: list[str]
    """Tensors of the checkpoint that are not part of the model."""


def load_with_transformers(
    checkpoint: SafetensorsCheckpoint, dtype: torch.dtype, device: torch.device
) -> LoadedWithTransformers:
    """Load a model. Raises ModelError where it cannot be served, or not as transformers itself would."""
    config = _config_of(checkpoint)
    model, report = _load(checkpoint, config, dtype)
    if not model._can_set_attn_implementation():
        raise _refusal(checkpoint, "its attention cannot be exchanged")
    model = model.to(device).eval().requires_grad_(False)
    try:
        module, shape = _tried(model, checkpoint.architecture, dtype)
    except Exception as error:
        raise _refusal(checkpoint, f"in a trial, {error}") from error
    identity = json.dumps([repr(shape), transformers.__version__, checkpoint.raw_config()], sort_keys=True)
    return LoadedWithTransformers(module, shape, identity, sorted(report["unexpected_keys"]))


class TransformersCausalLM(LanguageModel):
    """A model of transformers'. All tokens of a step go through it as one sequence; attention parts them again."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._attention = _CurrentAttention()
        decoder = model.get_decoder()
        path = next(path for path, module in model.named_modules() if module is decoder)
        self._body = _Body(decoder)
        model.set_submodule(path, self._body)
        self._model = model
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.kvern_attention = self._attention

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionMetadata, kv: Tensor) -> Tensor:
        return self.decode(token_ids, positions, _PagedAttention(attention, kv))

    def decode(self, token_ids: Tensor, positions: Tensor, attention: _Attention) -> Tensor:
        """Return hidden states: [num_tokens, hidden_size]."""
        with self._attention.being(attention):
            return self._body.decode(token_ids[None].long(), positions[None])[0]

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].to(torch.float32)


class _Body(nn.Module):
    """Stands where the head looks for the decoder, and hands it hidden states that are computed already."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def decode(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """[1, num_tokens] ids and positions -> [1, num_tokens, hidden_size]."""
        hidden: Tensor = self.decoder(input_ids=token_ids, position_ids=positions, use_cache=False).last_hidden_state
        return hidden

    def forward(self, *_args: Any, inputs_embeds: Tensor, **_kwargs: Any) -> _Decoded:
        return _Decoded(inputs_embeds)


@dataclass(frozen=True)
class _Decoded:
    """A decoder's output, of which the head needs the hidden states. All else is None."""

    last_hidden_state: Tensor

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


class _Attention(Protocol):
    """What the layers of one step attend with."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """q: [num_tokens, num_heads, head_dim]; k, v: with num_kv_heads. Returns the shape of q."""
        ...


@dataclass(frozen=True, slots=True)
class _PagedAttention:
    metadata: AttentionMetadata
    kv: Tensor

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        write_kv(self.kv, layer, k, v, self.metadata)
        return paged_attention(q, self.kv, layer, self.metadata, scale, sliding_window=window, softcap=softcap)


@dataclass(frozen=True, slots=True)
class _RecordedAttention:
    """Finds out what layers hand to their attention, and gives them zeros."""

    kv_shapes: dict[int, list[int]] = field(default_factory=dict)
    """By layer: [num_kv_heads, head_dim]."""
    windows: dict[int, int | None] = field(default_factory=dict)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        if layer in self.windows:
            raise ValueError(f"layer {layer} attends twice")
        if k.shape != v.shape:
            raise ValueError(f"keys are {list(k.shape[1:])} and values {list(v.shape[1:])}")
        self.kv_shapes[layer], self.windows[layer] = list(k.shape[1:]), window
        return torch.zeros_like(q)


class _CurrentAttention:
    """Where the layers of one model find what they attend with."""

    def __init__(self) -> None:
        self.attention: _Attention | None = None

    @contextmanager
    def being(self, attention: _Attention) -> Iterator[None]:
        self.attention = attention
        try:
            yield
        finally:
            self.attention = None


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers wants it.

    query: [1, num_heads, num_tokens, head_dim]; key, value: with num_kv_heads. Returns [1, num_tokens, num_heads,
    head_dim]. Raises ValueError for a mask, since it could only be another one than that of causality and window.
    """
    if attention_mask is not None:
        raise ValueError("attention has a mask of its own")
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    attention: _Attention | None = module.kvern_attention.attention
    if attention is None:
        raise ValueError("its head runs the layers again")
    return attention.attend(module.layer_idx, q, k, v, scale, sliding_window, softcap)[None], None


transformers.AttentionInterface.register(_ATTENTION, _attend)
transformers.utils.logging.disable_progress_bar()


def _refusal(checkpoint: SafetensorsCheckpoint, reason: str) -> ModelError:
    return ModelError(f"{checkpoint.path}: architecture {checkpoint.architecture} is not supported: {reason}")


def _config_of(checkpoint: SafetensorsCheckpoint) -> Any:
    """Return transformers' configuration if it is one of a model that can be tried."""
    if checkpoint.raw_config().get("quantization_config") is not None:
        raise _refusal(checkpoint, "quantization_config: transformers would compute with quantized weights")
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if checkpoint.architecture not in names.values():
        raise _refusal(checkpoint, "transformers knows no decoder of this name")
    try:
        config = transformers.AutoConfig.from_pretrained(
            checkpoint.path, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ModelError(f"{checkpoint.path}: transformers cannot read its config: {error}") from error
    if names.get(config.model_type) != checkpoint.architecture:
        raise _refusal(checkpoint, f"it is none of model_type {config.model_type!r}, which config.json says")
    obstacle = _obstacle(config)
    if obstacle is not None:
        raise _refusal(checkpoint, obstacle)
    return config


def _obstacle(config: Any) -> str | None:
    """Return what would make attention over paged KV wrong, None where nothing is known to."""
    kinds = set(getattr(config, "layer_types", None) or []) - _LAYER_TYPES
    if kinds:
        return f"it has layers of kind {', '.join(sorted(map(str, kinds)))}"
    settings = getattr(config, "rope_parameters", None) or {}
    ropes = [settings, *(inner for inner in settings.values() if isinstance(inner, dict))]
    if {rope.get("rope_type") for rope in ropes} & _ROPES_BY_LENGTH:
        return "its rope depends on the longest sequence of a batch"
    reasons = {
        "it has an encoder": getattr(config, "is_encoder_decoder", False),
        "it is multimodal": config.get_text_config() is not config,
        "its positions are biases of attention (ALiBi)": getattr(config, "alibi", False),
        "its attention is in chunks": getattr(config, "attention_chunk_size", None),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _load(checkpoint: SafetensorsCheckpoint, config: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Return the model and what the loading reports. transformers itself would fill in what is missing at random."""
    # It would read a model.safetensors beside an index instead of what the index names.
    config.transformers_weights = checkpoint.weights_name()
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (ValueError, OSError, RuntimeError, KeyError, AttributeError) as error:
        raise ModelError(f"{checkpoint.path}: transformers cannot load it: {error}") from error
    wrong = sorted([*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])])
    if wrong:
        raise ModelError(f"{checkpoint.path}: tensors are missing or of another shape: {', '.join(wrong[:5])}")
    return model, report


@torch.inference_mode()
def _tried(model: Any, architecture: str, dtype: torch.dtype) -> tuple[LanguageModel, ModelShape]:
    """Run a few tokens with transformers' attention, then with ours, in pieces and in company. Both must agree."""
    num_tokens = sum(_TRIAL_PIECES)
    token_ids = torch.arange(num_tokens, device=model.device) * 7919 % model.config.vocab_size
    expected = model(input_ids=token_ids[None], use_cache=False).logits[0].float()
    model.set_attn_implementation(_ATTENTION)
    module = TransformersCausalLM(model)
    recorded = _RecordedAttention()
    module.decode(token_ids, torch.arange(num_tokens, device=model.device), recorded)
    shape = _shape_of(model.config, architecture, recorded)
    difference = float((_trial_logits(module, shape, token_ids, dtype) - expected).norm() / expected.norm())
    if not difference < _TRIAL_TOLERANCE[dtype]:
        raise ValueError(f"logits differ from transformers' own by {difference:.2g} of their norm")
    return module, shape


def _shape_of(config: Any, architecture: str, recorded: _RecordedAttention) -> ModelShape:
    """Return the shape as the layers showed it. Raises ValueError where the config says otherwise."""
    num_layers = config.num_hidden_layers
    if list(recorded.windows) != list(range(num_layers)):
        raise ValueError(f"{len(recorded.windows)} of {num_layers} layers attend")
    windows = tuple(recorded.windows[layer] for layer in range(num_layers))
    stated = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers
    expected = tuple(stated if kind == "sliding_attention" else None for kind in kinds[:num_layers])
    if windows != expected:
        raise ValueError(f"layers attend in windows of {windows}, and the config says {expected}")
    kv_shapes = list(recorded.kv_shapes.values())
    if any(kv_shape != kv_shapes[0] for kv_shape in kv_shapes):
        raise ValueError("layers differ in the shape of their keys")
    num_kv_heads, head_dim = kv_shapes[0]
    return ModelShape(
        architecture=architecture,
        vocab_size=config.vocab_size,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=config.max_position_embeddings,
        sliding_windows=windows,
    )


def _trial_logits(module: LanguageModel, shape: ModelShape, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits of token_ids, run piece by piece beside another sequence."""
    device, num_blocks = token_ids.device, -(-len(token_ids) // _TRIAL_BLOCK_SIZE)
    kv_shape = (2 * num_blocks, shape.num_layers, 2, shape.num_kv_heads, _TRIAL_BLOCK_SIZE, shape.head_dim)
    kv = torch.zeros(kv_shape, dtype=dtype, device=device)
    table = torch.arange(2 * num_blocks, device=device).view(num_blocks, 2).T.to(torch.int32)
    other = token_ids.flip(0)
    hidden, start = [], 0
    for count in _TRIAL_PIECES:
        positions = torch.arange(start, start + count, device=device)
        slots = table.long()[:, positions // _TRIAL_BLOCK_SIZE] * _TRIAL_BLOCK_SIZE + positions % _TRIAL_BLOCK_SIZE
        start += count
        attention = plan_attention(
            kv,
            block_table=table,
            cu_query_lens=torch.tensor([0, count, 2 * count], dtype=torch.int32, device=device),
            context_lens=torch.tensor([start, start], dtype=torch.int32, device=device),
            slot_mapping=slots.flatten(),
            sliding_windows=shape.sliding_windows,
        )
        tokens = torch.cat((token_ids[positions], other[positions]))
        hidden.append(module(tokens, positions.repeat(2), attention, kv)[:count])
    return module.logits(torch.cat(hidden))
