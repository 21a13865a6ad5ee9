"""Mixtures of experts from .gguf files: every type of tensor, both ways of storing experts, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvern.engine.errors import ModelError

from .tiny_gguf import Tensors, gguf_tensors, metadata_of, random_blocks, with_separate_experts, write_gguf
from .tiny_llama import load
from .tiny_models import expected_logits, expected_tokens, generate, paged_logits, save_tiny

K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_theta": 1e4}}
FIELDS: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_tiny(tmp_path_factory.mktemp("mixtral"), "Mixtral", hidden_size=64, intermediate_size=96, **MIXTRAL)


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Experts of 768 dimensions, for transformers takes that size for granted when it reads a file."""
    shape = {"hidden_size": 256, "moe_intermediate_size": 768, "num_hidden_layers": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return save_tiny(tmp_path_factory.mktemp("qwen3moe"), "Qwen3Moe", head_dim=64, **shape, **experts)


def write(path: Path, model: Any, arch: str, tensors: Tensors, kind: str = "F32", **changes: Any) -> Path:
    """Write a file whose experts, and other matrices where that is possible, are of one type."""
    metadata = metadata_of(model, arch, **(FIELDS | changes))
    quantization = gguf.GGMLQuantizationType[kind]
    if kind not in K_QUANTS:
        return write_gguf(path, tensors, quantization, metadata)
    raw = {name: random_blocks(kind, weights.shape) for name, weights in tensors.items() if "_exps." in name}
    return write_gguf(path, tensors, metadata=metadata, raw={quantization: raw})


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *K_QUANTS])
def test_logits_of_quantized_experts_equal_those_of_transformers(tmp_path: Path, qwen3_moe: Any, kind: str) -> None:
    """I01: transformers dequantizes the same file."""
    stated = {"vocab_size": 113, "expert_feed_forward_length": 768}
    path = write(tmp_path / "model.gguf", qwen3_moe, "qwen3moe", gguf_tensors(qwen3_moe, "qwen3moe"), kind, **stated)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    torch.testing.assert_close(paged_logits(load(path), 7), expected_logits(reference), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_experts_with_tensors_of_their_own_equal_stacked_ones(tmp_path: Path, mixtral: Any, kind: str) -> None:
    """transformers reads no Mixtral from a .gguf file; the model that it was made from stands in."""
    tensors = gguf_tensors(mixtral)
    stacked = load(write(tmp_path / "stacked.gguf", mixtral, "llama", tensors, kind))
    separate = load(write(tmp_path / "separate.gguf", mixtral, "llama", with_separate_experts(tensors), kind))
    assert torch.equal(paged_logits(separate, 7), paged_logits(stacked, 7))
    if kind == "F32":
        torch.testing.assert_close(paged_logits(separate, 7), expected_logits(mixtral), atol=1e-4, rtol=1e-4)
        assert generate(separate, 8, chunk=7) == expected_tokens(mixtral, 8)


@pytest.mark.parametrize("missing", ["blk.1.ffn_gate_inp.weight", "blk.1.ffn_up_exps.weight", "blk.1.ffn_up.2.weight"])
def test_tensor_missing_from_experts_is_refused_by_name(tmp_path: Path, mixtral: Any, missing: str) -> None:
    tensors = gguf_tensors(mixtral)
    if missing not in tensors:
        tensors = with_separate_experts(tensors)
    del tensors[missing]
    with pytest.raises(ModelError, match=rf"tensor {missing} is missing"):
        load(write(tmp_path / "model.gguf", mixtral, "llama", tensors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_count": 3}, r"mlp.gate.weight is \[4, 64\]; the config wants \[3, 64\]"),
        ({"expert_count": 1}, r"2 experts a token are more than the 1 there are"),
        ({"expert_count": 0}, r"tensor blk.0.ffn_gate.weight is missing"),
        ({"feed_forward_length": 95}, r"gate_proj.weight is \[96, 64\]; the config wants \[95, 64\]"),
    ],
)
def test_metadata_that_do_not_fit_the_experts_are_refused(
    tmp_path: Path, mixtral: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(write(tmp_path / "model.gguf", mixtral, "llama", gguf_tensors(mixtral), **changes))


@pytest.mark.parametrize("num_experts", [3, 5])
def test_tensor_of_another_number_of_experts_is_refused_by_name(tmp_path: Path, mixtral: Any, num_experts: int) -> None:
    tensors = gguf_tensors(mixtral)
    tensors["blk.1.ffn_up_exps.weight"] = tensors["blk.1.ffn_up_exps.weight"][[0, 1, 2, 3, 0][:num_experts]]
    message = rf"blk.1.ffn_up_exps.weight holds {num_experts} experts; llama.expert_count is 4"
    with pytest.raises(ModelError, match=message):
        load(write(tmp_path / "model.gguf", mixtral, "llama", tensors))


def test_experts_in_another_architecture_are_refused_by_name(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "Qwen2")
    with pytest.raises(ModelError, match=r"qwen2: expert_count: experts are supported in .* llama and qwen3moe only"):
        load(write(tmp_path / "model.gguf", model, "qwen2", gguf_tensors(model, "qwen2")))
