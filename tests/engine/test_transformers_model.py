"""Architectures that run with transformers' own code: the same logits and tokens as there, or a stated refusal."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvern.engine.errors import ModelError

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

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("Olmo2", {}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.5, "use_parallel_residual": True, "qk_layernorm": True}),
    "gpt-neox": ("GPTNeoX", {}),
    "granite": ("Granite", {"logits_scaling": 3.0, "tie_word_embeddings": True}),
    "cohere2": ("Cohere2", {"sliding_window": WINDOW, "layer_types": [SLIDING, SLIDING, FULL]}),
    "cohere": ("Cohere", {"logit_scale": 2.0}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "gpt-j": ("GPTJ", {"n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 256, "rotary_dim": 4}),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW}),
    "opt": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 48}),
    "qwen2 moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
}


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_logits_and_tokens_equal_transformers(tmp_path: Path, case: str) -> None:
    """I10: prompts of three times the window."""
    name, config = ARCHITECTURES[case]
    model = save_tiny(tmp_path, name, **config)
    loaded = load(tmp_path)
    assert type(loaded.module).__name__ == "TransformersCausalLM"
    assert loaded.num_parameters == model.num_parameters()
    assert loaded.eos_token_ids == {2}
    expected = expected_logits(model)
    for chunk in (len(PROMPT), 7):
        torch.testing.assert_close(paged_logits(loaded, chunk), expected, atol=1e-4, rtol=1e-4)
    assert generate(loaded, NUM_TOKENS, chunk=7) == expected_tokens(model, NUM_TOKENS)


LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8} | {
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "first_k_dense_replace": 3,
}


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        pytest.param("Mamba", {}, "layers of kind linear_attention", id="state space"),
        pytest.param("Lfm2", {"layer_types": [FULL, "conv", FULL]}, "layers of kind conv", id="convolution"),
        pytest.param("Bloom", {}, "its attention cannot be exchanged", id="attention of its own"),
        pytest.param("Falcon", {"alibi": True}, "biases of attention", id="alibi"),
        pytest.param("Falcon", {"alibi": False}, "its attention cannot be exchanged", id="falcon"),
        pytest.param("DeepseekV3", LATENT, r"keys are \[4, 16\] and values \[4, 8\]", id="latent attention"),
        pytest.param("Bart", {"decoder_layers": 2}, "layers attend", id="cross-attention"),
        pytest.param(
            "GptOss", {"num_local_experts": 4, "head_dim": 16}, "logits differ from transformers' own", id="sinks"
        ),
        pytest.param(
            "Olmo2",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "its rope depends on the longest sequence",
            id="dynamic rope",
        ),
    ],
)
def test_architecture_that_cannot_work_is_refused_with_the_reason(
    tmp_path: Path, name: str, config: dict[str, Any], message: str
) -> None:
    save_tiny(tmp_path, name, **config)
    with pytest.raises(ModelError, match=rf"architecture {name}ForCausalLM is not supported: .*{message}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, "transformers knows no decoder of this name"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "transformers knows no decoder of this name"),
        ({"architectures": ["NoSuchModel"]}, "transformers knows no decoder of this name"),
        ({"architectures": ["GPTNeoXForCausalLM"]}, "it is none of model_type 'olmo2'"),
        ({"model_type": "nonesuch"}, "transformers cannot read its config"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: "),
        ({"num_hidden_layers": 4}, r"tensors are missing or of another shape: model\.layers\.3\."),
        ({"intermediate_size": 71}, r"tensors are missing or of another shape: model\.layers\.0\.mlp"),
    ],
)
def test_config_that_transformers_cannot_run_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_tiny(tmp_path, "Olmo2")
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_tensor_missing_or_surplus_is_named(tmp_path: Path, tensor: str, caplog: pytest.LogCaptureFixture) -> None:
    """I03: transformers would fill in a missing head at random."""
    model = save_tiny(tmp_path, "Olmo2")
    edit_shards(tmp_path, {"model.extra.weight": torch.ones(3)})
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path)
    assert "1 tensors are not part of the model and were left out: model.extra.weight" in caplog.text
    torch.testing.assert_close(paged_logits(loaded, 30), expected_logits(model), atol=1e-4, rtol=1e-4)
    edit_shards(tmp_path, {}, remove=tensor)
    with pytest.raises(ModelError, match=f"tensors are missing or of another shape: {re.escape(tensor)}"):
        load(tmp_path)


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    """I05: beside an index, transformers itself would read a model.safetensors."""
    model = save_tiny(tmp_path, "Olmo2")
    other = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    save_file(other, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "extra.safetensors").write_bytes(b"damaged")
    torch.testing.assert_close(paged_logits(load(tmp_path), 7), expected_logits(model), atol=1e-4, rtol=1e-4)


def test_single_file_of_any_name_is_read(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "Olmo2")
    for file in tmp_path.glob("model*"):
        file.unlink()
    save_file(model.state_dict(), tmp_path / "weights.safetensors", {"format": "pt"})
    torch.testing.assert_close(paged_logits(load(tmp_path), 7), expected_logits(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_honoured_near_transformers(tmp_path: Path, dtype: str) -> None:
    """I11."""
    model = save_tiny(tmp_path, "Olmo2")
    loaded = load(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {getattr(torch, dtype)}
    assert_near_in_low_precision(loaded, model)
