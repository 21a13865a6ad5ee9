"""Tiny random Llamas, made and saved by transformers, and the logits that Kvern's loader and model give for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvern.engine.config import EngineConfig
from kvern.engine.kv_cache import allocate_kv
from kvern.engine.model.loader import LoadedModel, load_model
from kvern.kernels.paged_attention import plan_attention

VOCAB_SIZE = 97
PROMPT = [(7 * position * position + 3) % VOCAB_SIZE for position in range(70)]

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 2,
}


def make_tiny(seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """Return a random model in float32."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(_SHAPE | config))).eval()


def save_tiny(path: Path, *, max_shard_size: str = "1GB", seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """Make a random model and save it as Hugging Face does."""
    model = make_tiny(seed, **config)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file. None removes a field. A missing file is made."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(EngineConfig(model_path=path, device="cpu", **options))


@torch.inference_mode()
def logits_of(model: LoadedModel, token_ids: list[int] = PROMPT) -> Tensor:
    """Return the logits of every position of one prompt: [num_tokens, vocab_size]."""
    block_size = 16
    num_blocks = -(-len(token_ids) // block_size)
    kv = allocate_kv(model, block_size, num_blocks)
    metadata = plan_attention(
        kv,
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
        cu_query_lens=torch.tensor([0, len(token_ids)], dtype=torch.int32),
        context_lens=torch.tensor([len(token_ids)], dtype=torch.int32),
        slot_mapping=torch.arange(len(token_ids)),
        sliding_windows=model.config.sliding_windows,
        kv_scales=model.kv_scales,
    )
    hidden = model.module(torch.tensor(token_ids), torch.arange(len(token_ids)), metadata, kv)
    return model.module.logits(hidden)


@torch.inference_mode()
def expected_logits(model: LlamaForCausalLM, token_ids: list[int] = PROMPT) -> Tensor:
    logits: Tensor = model(torch.tensor([token_ids])).logits[0].float()
    return logits


def assert_same_logits(loaded: LoadedModel, expected: Tensor) -> None:
    """Within 1e-4, and with the same greedy token everywhere."""
    actual = logits_of(loaded)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
