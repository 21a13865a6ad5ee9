"""GGUF files of other architectures: the same logits as the model they were made from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern.engine.errors import ModelError

from .tiny_gguf import gguf_tensors, metadata_of, write_gguf
from .tiny_llama import load
from .tiny_models import PROMPT, WINDOW, expected_logits, expected_tokens, generate, paged_logits, save_tiny

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LOCAL, GLOBAL = {"rope_theta": 1e4, "rope_type": "default"}, {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}

CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama, yarn": (
        "Llama",
        "llama",
        {"rope_parameters": YARN},
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 16,
        },
    ),
    "mistral": ("Mistral", "llama", {"sliding_window": WINDOW}, {"attention__sliding_window": WINDOW}),
    "mixtral": (
        "Mixtral",
        "llama",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": LOCAL},
        {"expert_count": 5, "expert_used_count": 2},
    ),
    "smollm3": ("SmolLM3", "smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}, {"rope__freq_base": 2e6}),
    "qwen2": ("Qwen2", "qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3": ("Qwen3", "qwen3", {"head_dim": 16}, {}),
    "qwen3moe": (
        "Qwen3Moe",
        "qwen3moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
        {
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 40,
            "feed_forward_length": None,
        },
    ),
    "qwen3moe, size of experts not stated": (
        "Qwen3Moe",
        "qwen3moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
        {"expert_count": 6, "expert_used_count": 3},
    ),
    "phi3": ("Phi3", "phi3", {"sliding_window": WINDOW}, {"attention__sliding_window": WINDOW}),
    "phi3, partial rotary": (
        "Phi3",
        "phi3",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope__dimension_count": 6, "attention__sliding_window": 0},
    ),
    "gemma2": (
        "Gemma2",
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0},
        {
            "attention__sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma2, what old files leave out": ("Gemma2", "gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16}, {}),
    "gemma2, 27b": (
        "Gemma2",
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 12, "num_hidden_layers": 46},
        {},
    ),
    "gemma3, another pattern": (
        "Gemma3",
        "gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": LOCAL, "sliding_attention": LOCAL},
        },
        {"attention__sliding_window": WINDOW, "attention__sliding_window_pattern": 2},
    ),
    "gemma3": (
        "Gemma3",
        "gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "num_hidden_layers": 7,
            "rope_parameters": {"full_attention": GLOBAL, "sliding_attention": LOCAL},
        },
        {
            "attention__sliding_window": WINDOW,
            "rope__freq_base": 1e6,
            "rope__scaling__type": "linear",
            "rope__scaling__factor": 8.0,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_tokens_equal_the_model_it_was_made_from(tmp_path: Path, case: str) -> None:
    name, arch, config, fields = CASES[case]
    model = save_tiny(tmp_path / "hf", name, **config)
    metadata = metadata_of(model, arch, **fields)
    loaded = load(write_gguf(tmp_path / "model.gguf", gguf_tensors(model, arch), metadata=metadata))
    # A Mistral without experts is a Llama to llama.cpp.
    assert loaded.config.architecture == f"{name.replace('Mistral', 'Llama')}ForCausalLM"
    assert loaded.num_parameters == model.num_parameters()
    torch.testing.assert_close(paged_logits(loaded, 7), expected_logits(model), atol=1e-4, rtol=1e-4)
    assert generate(loaded, 8, chunk=len(PROMPT)) == expected_tokens(model, 8)


def test_longrope_is_read_with_the_factors_for_the_served_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]}
    settings |= {"long_factor": [1.0, 3.0, 3.5, 4.0, 5.0, 6.0], "attention_factor": 1.25}
    model = save_tiny(tmp_path / "hf", "Phi3", rope_parameters=settings, original_max_position_embeddings=20)
    fields = {
        "rope__scaling__type": "longrope",
        "rope__scaling__attn_factor": 1.25,
        "rope__scaling__original_context_length": 20,
    }
    tensors = gguf_tensors(model, "phi3")
    for length in ("short", "long"):
        tensors[f"rope_factors_{length}.weight"] = torch.tensor(settings[f"{length}_factor"]).numpy()
    path = write_gguf(tmp_path / "model.gguf", tensors, metadata=metadata_of(model, "phi3", **fields))
    with caplog.at_level(logging.WARNING):
        for tokens, max_model_len in ((PROMPT, None), (PROMPT, 21), (PROMPT[:20], 20)):
            loaded = load(path, max_model_len=max_model_len)
            torch.testing.assert_close(
                paged_logits(loaded, 7, tokens), expected_logits(model, tokens), atol=1e-4, rtol=1e-4
            )
    assert caplog.text.count("a max_model_len of at most 20 would use those for short ones") == 2
    del tensors["rope_factors_long.weight"]
    with pytest.raises(ModelError, match=r"tensor rope_factors_long\.weight is missing"):
        load(write_gguf(path, tensors, metadata=metadata_of(model, "phi3", **fields)))


def test_tensor_missing_from_a_fused_model_is_refused_by_name(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "Phi3")
    tensors = gguf_tensors(model, "phi3")
    del tensors["blk.1.attn_qkv.weight"]
    with pytest.raises(ModelError, match=r"tensor blk\.1\.attn_qkv\.weight is missing"):
        load(write_gguf(tmp_path / "model.gguf", tensors, metadata=metadata_of(model, "phi3")))
