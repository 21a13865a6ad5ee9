"""Weights and KV in fp8: what is loaded, what is refused, and how near the answers stay."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvern.engine.config import EngineConfig
from kvern.engine.contract import cache_contract
from kvern.engine.errors import ConfigError, ModelError
from kvern.engine.model.causal_lm import CausalLM
from kvern.engine.model.fp8_support import check_fp8
from kvern.engine.model.loader import LoadedModel
from kvern.engine.sizes import fp8_sizes
from kvern.engine.startup import build_engine, start_engine
from kvern.kernels.fp8_linear import FP8, quantize_rows

from . import tiny_models
from .engine_harness import EngineHarness
from .tiny_llama import PROMPT, edit_json, expected_logits, load, logits_of, save_tiny

LAYERS, KV_HEADS = 2, 2
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
    "ignore": ["lm_head"],
}
QUANTIZED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    save_tiny(path, attention_bias=True)
    return path


@pytest.fixture
def expected(plain: Path) -> Tensor:
    return logits_of(load(plain))


def edited(path: Path, into: Path, quantization: dict[str, Any] | None = None, **tensors: Tensor) -> Path:
    """Copy a checkpoint with tensors added or replaced, and what its config says of quantization."""
    config = json.loads((path / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config))
    edit_json(into / "config.json", quantization_config=quantization)
    save_file(load_file(path / "model.safetensors") | tensors, into / "model.safetensors", {"format": "pt"})
    return into


def stored_in_fp8(path: Path, into: Path, quantization: dict[str, Any], *, per_tensor: bool = False) -> Path:
    """Save a checkpoint's projections in fp8 with scales, as published ones have them."""
    tensors = {}
    for name, weight in load_file(path / "model.safetensors").items():
        if name.split(".")[-2] in QUANTIZED and name.endswith(".weight"):
            values, scales = quantize_rows(weight.view(1, -1) if per_tensor else weight)
            tensors |= {name: values.view(weight.shape), f"{name}_scale": scales.squeeze() if per_tensor else scales}
            tensors[name.replace("weight", "input_scale")] = torch.tensor(1.0)
    return edited(path, into, quantization, **tensors)


def distance(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())


def test_weights_are_rounded_and_everything_else_stays(plain: Path, expected: Tensor) -> None:
    model = load(plain, quantization="fp8")
    in_fp8 = {name for name, parameter in model.module.named_parameters() if parameter.dtype is FP8}
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert in_fp8 == {f"model.layers.{layer}.{name}.weight" for layer in range(LAYERS) for name in names}
    assert 0 < distance(logits_of(model), expected) < 0.25


def test_parameters_and_bytes_are_those_that_the_configuration_tells(plain: Path) -> None:
    model, full = load(plain, quantization="fp8"), load(plain)
    weights, scales = fp8_sizes(model.config)  # type: ignore[arg-type]
    assert model.num_parameters == full.num_parameters
    assert model.weight_bytes == full.weight_bytes - 4 * weights + weights + 4 * scales


def test_rounding_while_loading_equals_a_checkpoint_stored_so(plain: Path, tmp_path: Path) -> None:
    stored = load(stored_in_fp8(plain, tmp_path, COMPRESSED))
    assert torch.equal(logits_of(stored), logits_of(load(plain, quantization="fp8")))


def test_checkpoint_with_one_scale_a_tensor_is_read(plain: Path, tmp_path: Path, expected: Tensor) -> None:
    method = {"quant_method": "fp8", "activation_scheme": "static"}
    model = load(stored_in_fp8(plain, tmp_path, method, per_tensor=True))
    scales = model.module.get_parameter("model.layers.0.self_attn.qkv_proj.weight_scale")
    assert len(scales.unique()) == 3, "queries, keys and values have their own"
    assert 0 < distance(logits_of(model), expected) < 0.25


def test_scales_of_activations_are_no_surplus(plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(stored_in_fp8(plain, tmp_path, COMPRESSED))
    assert "left out" not in caplog.text


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "scales of blocks"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.0"]}, r"\(model.layers.0\)"),
        (
            COMPRESSED | {"config_groups": {"a": {"weights": {"type": "int", "num_bits": 8}}}},
            "weights that are not fp8",
        ),
        (COMPRESSED | {"config_groups": {}}, "weights that are not fp8"),
    ],
)
def test_other_quantization_is_refused_with_the_reason(
    plain: Path, tmp_path: Path, quantization: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        load(edited(plain, tmp_path, quantization))


def test_fp8_tensors_that_cannot_be_used_are_refused(plain: Path, tmp_path: Path) -> None:
    """A head in fp8 would be read without its scales; one scale for two outputs is nobody's."""
    values, _ = quantize_rows(load_file(plain / "model.safetensors")["lm_head.weight"])
    with pytest.raises(ModelError, match=r"lm_head.weight is in fp8"):
        load(edited(plain, tmp_path, COMPRESSED, **{"lm_head.weight": values}))
    stored = stored_in_fp8(plain, tmp_path, COMPRESSED)
    name = "model.layers.1.mlp.up_proj.weight_scale"
    with pytest.raises(ModelError, match=r"up_proj.weight_scale is \[48\]; one number, or one for each of 96 outputs"):
        load(edited(stored, tmp_path, COMPRESSED, **{name: torch.ones(48)}))


def test_kv_scales_come_from_the_checkpoint_for_each_layer_and_head(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scales = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.5),
        "model.layers.0.self_attn.v_scale": torch.tensor([2.0, 4.0]),
        "model.layers.1.self_attn.k_proj.k_scale": torch.tensor([0.25]),
    }
    path = edited(plain, tmp_path, **scales)
    with caplog.at_level(logging.WARNING):
        model = load(path, kv_cache_dtype="fp8")
    assert model.kv_scales is not None
    assert model.kv_scales.tolist() == [[[0.5, 0.5], [0.25, 0.25]], [[2, 4], [1, 1]]]
    assert "1 of 4 scales for an fp8 KV cache" in caplog.text
    assert load(path).kv_scales is None


@pytest.mark.parametrize("scale", [torch.tensor(0.0), torch.tensor(float("nan")), torch.ones(3)])
def test_kv_scales_that_nothing_can_be_divided_by_are_refused(plain: Path, tmp_path: Path, scale: Tensor) -> None:
    path = edited(plain, tmp_path, **{"model.layers.1.self_attn.v_scale": scale})
    with pytest.raises(ModelError, match=r"model.layers.1.self_attn.v_scale has"):
        load(path, kv_cache_dtype="fp8")


def contract(model: LoadedModel, **options: Any) -> str:
    return build_engine(model, EngineConfig(model_path=model.path, num_blocks=20, **options)).contract


def test_contract_differs_by_weights_kv_type_and_scales(plain: Path) -> None:
    auto, kv = load(plain), load(plain, kv_cache_dtype="fp8")
    assert kv.kv_scales is not None
    scaled = kv.kv_scales.clone()
    scaled[1, 1, 0] = 0.5
    models = [auto, kv, replace(kv, kv_scales=scaled), load(plain, quantization="fp8")]
    assert len({contract(model) for model in models}) == len(models)
    assert contract(load(plain, kv_cache_dtype="fp8")) == contract(kv)
    assert cache_contract(model_fingerprint="", dtype="", kv_dtype="", block_size=1)


@pytest.mark.parametrize("weights", [None, "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_with_kv_in_fp8_generates_what_its_model_finds_likeliest(
    plain: Path, dtype: str, weights: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each token is the likeliest, up to rounding, after those before it in one piece; found again, the same."""
    options: dict[str, Any] = {"dtype": dtype, "quantization": weights, "kv_cache_dtype": "fp8"}
    harness = EngineHarness(start_engine(EngineConfig(plain, device="cpu", num_blocks=40, **options)))
    capacity = harness.engine.capacity
    assert capacity.kv_bytes == 40 * LAYERS * 2 * KV_HEADS * 16 * 16
    assert any("in float8_e4m3fn: 40 blocks" in line for line in capacity.lines())
    assert "fp8 on a CPU is slower" in caplog.text
    outcomes = [harness.add(PROMPT[start:], 8) for start in (0, 5, 31)]
    harness.run()
    again = harness.generate(PROMPT, 8)
    assert again.token_ids == outcomes[0].token_ids
    assert again.request.num_cached_tokens == 64
    model, rounding = load(plain, **options), 0.1 if dtype == "float32" else 0.25
    for start, outcome in zip((0, 5, 31), outcomes, strict=True):
        logits = logits_of(model, PROMPT[start:] + outcome.token_ids)[-9:-1]
        chosen = logits[torch.arange(8), outcome.token_ids]
        assert (logits.amax(1) - chosen < rounding).all()


def test_scales_of_kv_undo_themselves(plain: Path, expected: Tensor) -> None:
    """A scale that is a power of two changes exponents, and only of tiny numbers more; one far too small cuts off."""
    model = load(plain, kv_cache_dtype="fp8")
    assert model.kv_scales is not None
    logits = logits_of(model)
    assert 0 < distance(logits, expected) < 0.25
    assert distance(logits_of(replace(model, kv_scales=model.kv_scales / 4)), logits) < 0.01
    assert distance(logits_of(replace(model, kv_scales=model.kv_scales / 1024)), expected) > 0.25


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
@pytest.mark.parametrize("field", ["quantization", "kv_cache_dtype"])
def test_gpu_without_fp8_is_refused_with_its_capability(field: str, capability: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=rf"{field}: .* 9.0 or higher; this one has 8.{capability[1]}") as refused:
        check_fp8(field, capability)
    assert refused.value.field == field
    check_fp8(field, (9, 0))
    check_fp8(field, (10, 0))


def test_names_that_are_none_are_refused(plain: Path) -> None:
    with pytest.raises(ConfigError, match="quantization: 'int3' is not one of fp8, int8, int4"):
        load(plain, quantization="int3")
    with pytest.raises(ConfigError, match="kv_cache_dtype: 'int8' is neither auto nor fp8"):
        load(plain, kv_cache_dtype="int8")


def test_models_whose_weights_cannot_be_in_fp8_are_refused(tmp_path: Path) -> None:
    tiny_models.save_tiny(tmp_path / "odd", "Llama")
    with pytest.raises(ConfigError, match="quantization: a layer of 72 inputs and 48 outputs cannot be in fp8"):
        load(tmp_path / "odd", quantization="fp8")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    tiny_models.save_tiny(tmp_path / "experts", "Qwen3Moe", **experts)
    with pytest.raises(ConfigError, match="quantization: the experts of a Qwen3MoeForCausalLM"):
        load(tmp_path / "experts", quantization="fp8")
    tiny_models.save_tiny(tmp_path / "other", "Olmo2")
    with pytest.raises(ConfigError, match="quantization: Olmo2ForCausalLM is computed by transformers"):
        load(tmp_path / "other", quantization="fp8")


def test_expected_logits_are_those_of_transformers(plain: Path, expected: Tensor) -> None:
    assert isinstance(load(plain).module, CausalLM)
    from transformers import LlamaForCausalLM

    assert distance(expected, expected_logits(LlamaForCausalLM.from_pretrained(plain))) < 1e-5
