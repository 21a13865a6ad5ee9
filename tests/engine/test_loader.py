"""Loading Hugging Face directories: the same logits as transformers, and errors that say what is wrong."""

from __future__ import annotations

import logging
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from kvern.engine.config import EngineConfig
from kvern.engine.errors import ConfigError, ModelError
from kvern.engine.model.fingerprint import model_fingerprint
from kvern.engine.model.loader import load_model

from .tiny_llama import assert_same_logits, edit_json, expected_logits, load, logits_of, save_tiny

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def edit_tensors(file: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of a safetensors file. A dot is written as two underscores."""
    tensors: dict[str, Any] = load_file(file) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file, {"format": "pt"})


@pytest.mark.parametrize("tie_word_embeddings", [False, True])
@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
def test_logits_of_whole_and_sharded_checkpoints_equal_transformers(
    tmp_path: Path, max_shard_size: str, tie_word_embeddings: bool
) -> None:
    """I01."""
    model = save_tiny(tmp_path, max_shard_size=max_shard_size, tie_word_embeddings=tie_word_embeddings)
    assert (tmp_path / INDEX).exists() == (max_shard_size == "60KB")
    loaded = load(tmp_path)
    assert_same_logits(loaded, expected_logits(model))
    assert loaded.num_parameters == model.num_parameters()
    assert loaded.weight_bytes == 4 * model.num_parameters()


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param({"head_dim": 24}, id="heads wider than their share"),
        pytest.param({"num_key_value_heads": 4}, id="no grouped queries"),
        pytest.param({"num_key_value_heads": 1}, id="one KV head"),
        pytest.param({"rms_norm_eps": 0.1}, id="another epsilon"),
        pytest.param({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, id="another theta"),
        pytest.param({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, id="linear rope"),
        pytest.param(
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            id="llama3 rope",
        ),
    ],
)
def test_logits_of_other_shapes_equal_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    model = save_tiny(tmp_path, **config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.copy_(torch.randn(parameter.shape))
    model.save_pretrained(tmp_path)
    assert_same_logits(load(tmp_path), expected_logits(model))


def test_old_spelling_of_rope_scaling_loads_as_the_new_one(tmp_path: Path) -> None:
    """I06: "type" for "rope_type", and theta beside it."""
    parameters = {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0}
    model = save_tiny(tmp_path, rope_parameters=parameters)
    scaling = {"type": "linear", "factor": 2.0}
    edit_json(tmp_path / "config.json", rope_parameters=None, rope_theta=300.0, rope_scaling=scaling)
    assert_same_logits(load(tmp_path), expected_logits(model))


def test_head_present_though_tied_is_used_as_transformers_does(tmp_path: Path) -> None:
    """I02."""
    save_tiny(tmp_path, tie_word_embeddings=False)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    reference = LlamaForCausalLM.from_pretrained(tmp_path)
    assert not torch.equal(reference.lm_head.weight, reference.model.embed_tokens.weight)
    assert_same_logits(load(tmp_path), expected_logits(reference))


def test_head_equal_to_the_embedding_is_kept_once(tmp_path: Path) -> None:
    """I02."""
    model = save_tiny(tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path / WEIGHTS, lm_head__weight=model.lm_head.weight.detach().clone())
    loaded = load(tmp_path)
    assert loaded.num_parameters == model.num_parameters()
    assert_same_logits(loaded, expected_logits(model))


def test_head_missing_and_not_tied_is_refused(tmp_path: Path) -> None:
    """I03."""
    save_tiny(tmp_path, tie_word_embeddings=True)
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing.*tie"):
        load(tmp_path)


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    """I05."""
    model = save_tiny(tmp_path, max_shard_size="60KB")
    other = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    save_file(other, tmp_path / WEIGHTS)
    (tmp_path / "extra.safetensors").write_bytes(b"damaged")
    assert_same_logits(load(tmp_path), expected_logits(model))


def test_end_ids_are_the_union_of_what_the_files_say(tmp_path: Path) -> None:
    """I07."""
    save_tiny(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert load(tmp_path).eos_token_ids == {2}
    edit_json(tmp_path / "generation_config.json", eos_token_id=[3, 4])
    assert load(tmp_path).eos_token_ids == {2, 3, 4}
    edit_json(tmp_path / "tokenizer_config.json", eos_token={"content": "</s>"})
    edit_json(tmp_path / "tokenizer.json", model={"vocab": {"a": 0, "</s>": 5}}, added_tokens=[])
    assert load(tmp_path).eos_token_ids == {2, 3, 4, 5}
    edit_json(tmp_path / "tokenizer_config.json", eos_token="<end>", added_tokens_decoder={"6": {"content": "<end>"}})
    assert load(tmp_path).eos_token_ids == {2, 3, 4, 6}
    edit_json(tmp_path / "special_tokens_map.json", eos_token="<eot>")
    edit_json(tmp_path / "tokenizer.json", added_tokens=[{"id": 7, "content": "<eot>"}])
    assert load(tmp_path).eos_token_ids == {2, 3, 4, 6, 7}
    edit_json(tmp_path / "config.json", eos_token_id=[8, VOCABULARY_END, -1])
    edit_json(tmp_path / "generation_config.json", eos_token_id=None)
    assert load(tmp_path).eos_token_ids == {6, 7, 8}


VOCABULARY_END = 97


def test_end_ids_of_a_unigram_tokenizer_are_positions_in_its_list(tmp_path: Path) -> None:
    """I07."""
    save_tiny(tmp_path, eos_token_id=None)
    edit_json(tmp_path / "tokenizer_config.json", eos_token="</s>")
    edit_json(tmp_path / "tokenizer.json", model={"vocab": [["<pad>", 0.0], ["</s>", -1.5]]})
    assert 1 in load(tmp_path).eos_token_ids


def test_local_path_without_network_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G11."""
    save_tiny(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert load(tmp_path).config.num_layers == 2


def test_safetensors_load_without_the_gguf_package(
    tmp_path: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path)
    monkeypatch.delitem(sys.modules, "kvern.engine.model.gguf_checkpoint", raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert load(tmp_path).config.num_layers == 2
    with pytest.raises(ModelError, match="needs the Python package gguf"):
        load(smollm2_path)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)]
)
def test_dtype_auto_is_the_checkpoints_and_others_are_honoured(
    tmp_path: Path, dtype: str, expected: torch.dtype
) -> None:
    """I11."""
    model = save_tiny(tmp_path).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, dtype=dtype)
    assert loaded.dtype == expected
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {expected}
    torch.testing.assert_close(logits_of(loaded), expected_logits(model.float()), atol=0.3, rtol=0.1)
    edit_json(tmp_path / "config.json", dtype=None, torch_dtype=None)
    assert load(tmp_path, dtype=dtype).dtype == expected


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="weights are not packed")
@pytest.mark.parametrize("tie_word_embeddings", [False, True])
def test_weights_in_bfloat16_are_packed_and_held_once(tmp_path: Path, tie_word_embeddings: bool) -> None:
    """But for a tied embedding, which is looked up in as well."""
    model = save_tiny(tmp_path, tie_word_embeddings=tie_word_embeddings)
    loaded = load(tmp_path, dtype="bfloat16")
    held = {name.rpartition(".")[0].rpartition(".")[2] for name, _ in loaded.module.named_parameters()}
    assert held == {"embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"}
    assert loaded.num_parameters == model.num_parameters()
    copied = model.get_input_embeddings().weight.numel() if tie_word_embeddings else 0
    assert loaded.weight_bytes == 2 * (model.num_parameters() + copied)
    torch.testing.assert_close(logits_of(loaded), expected_logits(model), atol=0.3, rtol=0.1)


def test_surplus_tensors_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = save_tiny(tmp_path)
    edit_tensors(tmp_path / WEIGHTS, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path)
    assert "1 tensors are not part of the model" in caplog.text
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" in caplog.text
    assert_same_logits(loaded, expected_logits(model))


def test_progress_rises_from_zero_to_one(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    reports: list[tuple[float, str]] = []
    load_model(EngineConfig(model_path=tmp_path, device="cpu"), lambda share, what: reports.append((share, what)))
    shares = [share for share, _ in reports]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert any("q_proj" in what for _, what in reports)


def test_fingerprint_differs_where_weights_or_rope_differ_and_only_there(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "copy", "other weights", "other rope")]
    save_tiny(paths[0])
    shutil.copytree(paths[0], paths[1])
    save_tiny(paths[2], seed=1)
    shutil.copytree(paths[0], paths[3])
    edit_json(paths[3] / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    one, copy, weights, rope = (load(path).fingerprint for path in paths)
    assert one == copy
    assert len({one, weights, rope}) == 3


def test_fingerprint_of_large_files_differs_where_what_follows_the_header_does(tmp_path: Path) -> None:
    """Two fine-tunes: the same shapes, other numbers nearly everywhere."""
    fingerprints = set()
    for number in range(3):
        file = tmp_path / WEIGHTS
        file.write_bytes(bytes(3 << 20) + bytes([number]) * (1 << 20))
        fingerprints.add(model_fingerprint("one model", [file]))
    assert len(fingerprints) == 3


def test_path_that_is_missing_or_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere: no such file or directory"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json in it$"):
        load(tmp_path)
    (tmp_path / "some.gguf").touch()
    with pytest.raises(ModelError, match=r"no config\.json in it; .*some\.gguf"):
        load(tmp_path)
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"model\.bin: neither"):
        load(tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported"),
        ({"architectures": None}, "architectures names no model class"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers: 'two' is not a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0 is not a whole number above 0"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps: -1.0 is not a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes' is neither true nor false"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type: 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_parameters": ["linear"]}, "the rope settings are no JSON object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: "),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: "),
        ({"head_dim": 15}, "a head of 15 dimensions"),
        ({"dtype": "float64"}, "weights of type float64 are not supported"),
        ({"intermediate_size": 95}, r"gate_proj\.weight is \[96, 64\]; the config wants \[95, 64\]"),
        ({"num_hidden_layers": 3}, r"tensor model\.layers\.2\.\S+ is missing"),
    ],
)
def test_config_that_cannot_be_run_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_tiny(tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_config_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=re.escape(str(tmp_path / "config.json"))):
        load(tmp_path)


def test_damaged_weights_are_refused_naming_the_file(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    whole = (tmp_path / WEIGHTS).read_bytes()
    for content in (b"", whole[:100], whole[:-1], b"GGUF" + whole[4:]):
        (tmp_path / WEIGHTS).write_bytes(content)
        with pytest.raises(ModelError, match=rf"{WEIGHTS}: damaged"):
            load(tmp_path)


def test_missing_weights_are_refused_naming_them(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    edit_tensors(tmp_path / WEIGHTS, model__layers__1__self_attn__k_proj__weight=None)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.self_attn\.k_proj\.weight is missing"):
        load(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "a.safetensors")
    shutil.copy(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match=r"several weight files \(a\.safetensors, b\.safetensors\)"):
        load(tmp_path)
    (tmp_path / "a.safetensors").unlink()
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        load(tmp_path)


def test_missing_shard_is_refused_naming_it(tmp_path: Path) -> None:
    save_tiny(tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = load_file(shard)
    save_file({"other": torch.zeros(1)}, shard)
    with pytest.raises(ModelError, match=rf"{shard.name}: tensor {next(iter(whole))[:5]}"):
        load(tmp_path)
    shard.unlink()
    with pytest.raises(ModelError, match=f"shard {shard.name}, which {INDEX} names, is missing"):
        load(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(ModelError, match="no weight_map in it"):
        load(tmp_path)


def test_dtype_and_device_that_do_not_exist_are_config_errors(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with pytest.raises(ConfigError, match="dtype: 'int4' is not one of auto, float32, bfloat16, float16"):
        load(tmp_path, dtype="int4")
    with pytest.raises(ConfigError, match="device: 'tpu' is not one of auto, cpu, cuda"):
        load_model(EngineConfig(model_path=tmp_path, device="tpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device: no CUDA device"):
        load_model(EngineConfig(model_path=tmp_path, device="cuda"))
