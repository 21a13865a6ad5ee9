"""Loading .gguf files: the same logits as the model they were made from, and errors that say what is wrong."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import LlamaForCausalLM

from kvern.engine.errors import ModelError

from .tiny_gguf import gguf_tensors, write_gguf
from .tiny_llama import assert_same_logits, expected_logits, load, logits_of, make_tiny


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_tiny()


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_logits_equal_those_of_the_model_it_was_made_from(tmp_path: Path, config: dict[str, bool]) -> None:
    model = make_tiny(**config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape))
    loaded = load(write_gguf(tmp_path / "model.gguf", gguf_tensors(model)))
    assert_same_logits(loaded, expected_logits(model))
    assert loaded.config.tie_word_embeddings == config.get("tie_word_embeddings", False)
    assert loaded.dtype == torch.float32
    assert loaded.eos_token_ids == {2}


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_logits_equal_those_of_transformers(tmp_path: Path, model: LlamaForCausalLM, kind: str) -> None:
    """I01: transformers dequantizes the same file."""
    path = write_gguf(tmp_path / "model.gguf", gguf_tensors(model), gguf.GGMLQuantizationType[kind])
    reference = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    assert_same_logits(load(path), expected_logits(reference))


def test_llama3_rope_stored_as_divisors_equals_transformers(tmp_path: Path) -> None:
    """llama.cpp stores llama3's scaling as one divisor a frequency."""
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = make_tiny(rope_parameters=parameters)
    unscaled = make_tiny().model.rotary_emb.inv_freq
    divisors = (unscaled / model.model.rotary_emb.inv_freq).numpy()
    assert len(set(divisors.tolist())) > 2
    path = write_gguf(tmp_path / "model.gguf", gguf_tensors(model) | {"rope_freqs.weight": divisors})
    assert_same_logits(load(path), expected_logits(model))
    frequencies = dict(load(path, dtype="bfloat16").module.named_buffers())["model.rotary_embeddings.0.frequencies"]
    torch.testing.assert_close(frequencies, model.model.rotary_emb.inv_freq, atol=0, rtol=1e-6)


def test_linear_rope_equals_transformers(tmp_path: Path) -> None:
    model = make_tiny(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    scaling = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    path = write_gguf(tmp_path / "model.gguf", gguf_tensors(model), **scaling)
    assert_same_logits(load(path), expected_logits(model))


def test_end_ids_are_those_of_sequence_turn_and_message(tmp_path: Path, model: LlamaForCausalLM) -> None:
    """I07."""
    ids = {"tokenizer__ggml__eot_token_id": 5, "tokenizer__ggml__eom_token_id": 6}
    path = write_gguf(tmp_path / "model.gguf", gguf_tensors(model), **ids)
    assert load(path).eos_token_ids == {2, 5, 6}
    path = write_gguf(tmp_path / "none.gguf", gguf_tensors(model), tokenizer__ggml__eos_token_id=None)
    assert load(path).eos_token_ids == frozenset()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_asked_for_is_honoured(tmp_path: Path, model: LlamaForCausalLM, dtype: str) -> None:
    """I11."""
    loaded = load(write_gguf(tmp_path / "model.gguf", gguf_tensors(model)), dtype=dtype)
    assert loaded.dtype == getattr(torch, dtype)
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {loaded.dtype}
    torch.testing.assert_close(logits_of(loaded), expected_logits(model), atol=0.3, rtol=0.1)


def test_real_model_is_read_as_what_it_is(smollm2_path: Path) -> None:
    loaded = load(smollm2_path)
    shape = loaded.config
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (30, 9, 3, 64)
    assert (shape.vocab_size, shape.max_position_embeddings, shape.tie_word_embeddings) == (49152, 8192, True)
    assert (loaded.num_parameters, loaded.weight_bytes) == (134_515_008, 4 * 134_515_008)
    assert loaded.eos_token_ids == {2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"llama__block_count": None}, "block_count is missing"),
        ({"llama__attention__head_count": [4, 4]}, r"attention.head_count: \[4, 4\] is not a whole number"),
        ({"llama__attention__head_count_kv": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"llama__expert_count": 8}, "expert_used_count is missing"),
        ({"llama__rope__scaling__type": "dynamic"}, "rope.scaling.type: 'dynamic' is not supported"),
        ({"llama__rope__scaling__type": "yarn"}, "rope.scaling.factor is missing"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count: "),
        ({"llama__feed_forward_length": 95}, r"gate_proj.weight is \[96, 64\]; the config wants \[95, 64\]"),
    ],
)
def test_metadata_that_cannot_be_run_is_refused_by_name(
    tmp_path: Path, model: LlamaForCausalLM, changes: dict[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", gguf_tensors(model), **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.ffn_up.weight"])
def test_missing_tensor_is_refused_by_name(tmp_path: Path, model: LlamaForCausalLM, name: str) -> None:
    tensors = gguf_tensors(model)
    del tensors[name]
    with pytest.raises(ModelError, match=rf"tensor {name}.* is missing"):
        load(write_gguf(tmp_path / "model.gguf", tensors))


@pytest.mark.parametrize("kind", [999, gguf.GGMLQuantizationType.I8])
def test_tensor_of_unknown_type_is_refused_by_name(tmp_path: Path, model: LlamaForCausalLM, kind: int) -> None:
    """I08."""
    path = write_gguf(tmp_path / "model.gguf", gguf_tensors(model))
    name = b"blk.1.ffn_up.weight"
    content = bytearray(path.read_bytes())
    place = content.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", content, place) == (gguf.GGMLQuantizationType.F32,)
    struct.pack_into("<I", content, place, kind)
    path.write_bytes(content)
    shown = {999: "999", gguf.GGMLQuantizationType.I8: "I8"}[kind]
    with pytest.raises(ModelError, match=rf"model\.gguf: tensor blk\.1\.ffn_up\.weight has type {shown}"):
        load(path)


def test_damaged_file_is_refused_naming_it(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = write_gguf(tmp_path / "model.gguf", gguf_tensors(model))
    whole = path.read_bytes()
    for content in (b"", b"GGUF", b"PK" + whole[2:], whole[:200], whole[:-5000], whole[:4] + b"\x09" + whole[5:]):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"model\.gguf: damaged or not a GGUF file"):
            load(path)
