"""Every architecture that Kvern computes itself, beside transformers: the same logits and greedy tokens."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvern.engine.errors import ConfigError, ModelError

from .tiny_llama import edit_json, load
from .tiny_models import (
    PROMPT,
    WINDOW,
    assert_near_in_low_precision,
    edit_shards,
    expected_logits,
    expected_tokens,
    generate,
    paged_logits,
    save_tiny,
)

NUM_TOKENS = 24
SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [2.0, 3.0, 4.0],
}

NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, biases, tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, linear rope": ("Llama", {"rope_parameters": LINEAR}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("Llama", {"rope_parameters": YARN}),
    "llama, yarn rope with all settings": (
        "Llama",
        {
            "rope_parameters": YARN
            | {"original_max_position_embeddings": 64, "beta_fast": 4.0, "beta_slow": 0.7, "truncate": False}
            | {"mscale": 0.7, "mscale_all_dim": 0.4}
        },
    ),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3, windows": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "phi3, partial rotary": ("Phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 7}),
    "gemma2, tight caps": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 0.7,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": WINDOW, "layer_types": [SLIDING, SLIDING, FULL]}),
    "gemma3, scaled": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": [FULL, SLIDING, FULL],
            "final_logit_softcapping": 3.0,
            "rope_parameters": {FULL: LINEAR | {"rope_theta": 1e6}, SLIDING: {"rope_theta": 300.0}},
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "qwen3 moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
        },
    ),
    "qwen3 moe, normalized, windows": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
        },
    ),
}


@pytest.mark.parametrize("case", NATIVE)
def test_logits_and_tokens_equal_transformers(tmp_path: Path, case: str) -> None:
    """I10: prompts of three times the window."""
    name, config = NATIVE[case]
    model = save_tiny(tmp_path, name, **config)
    loaded = load(tmp_path)
    assert type(loaded.module).__name__ == "CausalLM"
    assert loaded.num_parameters == model.num_parameters()
    expected = expected_logits(model)
    for chunk in (len(PROMPT), 7):
        torch.testing.assert_close(paged_logits(loaded, chunk), expected, atol=1e-4, rtol=1e-4)
    assert generate(loaded, NUM_TOKENS, chunk=7) == expected_tokens(model, NUM_TOKENS)


@pytest.mark.parametrize(
    ("case", "tensor"),
    [
        ("mixtral", "model.layers.2.block_sparse_moe.experts.3.w3.weight"),
        ("qwen3 moe", "model.layers.2.mlp.experts.3.up_proj.weight"),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight"),
        ("gemma2", "model.layers.1.pre_feedforward_layernorm.weight"),
    ],
)
def test_tensor_missing_or_surplus_is_named(
    tmp_path: Path, case: str, tensor: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, config = NATIVE[case]
    model = save_tiny(tmp_path, name, **config)
    edit_shards(tmp_path, {"model.extra.weight": torch.ones(3)})
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path)
    assert "1 tensors are not part of the model and were left out: model.extra.weight" in caplog.text
    torch.testing.assert_close(paged_logits(loaded, 30), expected_logits(model), atol=1e-4, rtol=1e-4)
    edit_shards(tmp_path, {}, remove=tensor)
    with pytest.raises(ModelError, match=f"tensor {re.escape(tensor)} is missing"):
        load(tmp_path)


OLD_LLAMA3 = {name: value for name, value in LLAMA3.items() if name not in ("rope_type", "rope_theta")}
OLD_YARN = {"factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("llama", {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {"rope_theta": 300.0, "rope_scaling": None}),
        ("llama", {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | OLD_LLAMA3}),
        ("llama", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | OLD_LLAMA3}),
        ("llama", {"rope_theta": 5e5, "rope_parameters": {"type": "llama3"} | OLD_LLAMA3}),
        ("llama", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "rope_type": "llama3"} | OLD_LLAMA3}),
        ("llama", {"rope_scaling": {"type": "yarn", "rope_type": "yarn"} | OLD_YARN}),
        ("qwen2", {"rope_theta": 1e6, "rope_scaling": {"type": "yarn"} | OLD_YARN}),
        ("qwen3", {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8}}),
        ("llama", {"original_max_position_embeddings": 32, "rope_scaling": {"type": "yarn"} | OLD_YARN}),
        ("mixtral", {"rope_theta": None}),
        ("phi3, partial rotary", {"partial_rotary_factor": 0.5}),
        ("phi3", {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "su"} | LONGROPE}),
        (
            "gemma3",
            {"rope_theta": 1e5, "rope_local_base_freq": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
        ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "layer_types": None}),
        ("gemma3", {"sliding_window_pattern": 3, "layer_types": None}),
        ("gemma2", {"layer_types": None, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("qwen2, windows", {"layer_types": None}),
    ],
)
def test_old_spellings_of_settings_are_read_as_transformers_reads_them(
    tmp_path: Path, case: str, changes: dict[str, Any]
) -> None:
    """I06."""
    name, config = NATIVE[case]
    save_tiny(tmp_path, name, **config)
    edit_json(tmp_path / "config.json", **({"rope_parameters": None} | changes))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(paged_logits(load(tmp_path), 7), expected_logits(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: 'dynamic' is not"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}, "max_position_embeddings": None}, "max_position"),
        ("phi3", {"rope_parameters": LONGROPE | {"short_factor": [1.0]}}, "short_factor: a list of 6 numbers"),
        ("phi3", {"rope_parameters": LONGROPE | {"short_factor": [1.0] * 6}}, "long_factor: a list of 6 numbers"),
        ("phi3", {"rope_parameters": {"rope_type": "linear"}}, "rope_type: 'linear' is not supported"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types: full_attention or sliding_attention"),
        ("qwen2", {"layer_types": [FULL]}, "needed for each of 3 layers"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: an item for each of 3 layers"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window: is not supported"),
        ("mistral", {"sliding_window": 0}, "sliding_window: 0 is not a whole number above 0"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation: 'relu' is not supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention: is not supported"),
        ("mixtral", {"num_experts_per_tok": 9}, "9 experts a token are more than the 5 there are"),
        ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}, "is not supported for experts"),
    ],
)
def test_setting_that_cannot_be_run_is_refused_by_name(
    tmp_path: Path, case: str, changes: dict[str, Any], message: str
) -> None:
    name, config = NATIVE[case]
    save_tiny(tmp_path, name, **config)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["qwen3", "phi3", "gemma2", "gemma3", "mixtral", "qwen3 moe"])
def test_low_precision_is_honoured_near_transformers_or_refused(tmp_path: Path, case: str, dtype: str) -> None:
    """I11."""
    name, config = NATIVE[case]
    model = save_tiny(tmp_path, name, **config)
    if dtype == "float16" and case.startswith("gemma"):
        with pytest.raises(ConfigError, match=f"dtype: float16 overflows in {name}ForCausalLM"):
            load(tmp_path, dtype=dtype)
        return
    loaded = load(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {getattr(torch, dtype)}
    assert_near_in_low_precision(loaded, model)
