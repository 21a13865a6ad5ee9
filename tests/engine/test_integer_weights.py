"""Weights in int8 and int4: what is rounded, what is refused, and what a whole engine answers with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvern.engine.config import EngineConfig
from kvern.engine.errors import ConfigError
from kvern.engine.model.config import ModelConfig
from kvern.engine.model.integer_weights import with_integers
from kvern.engine.model.layers import Linear
from kvern.engine.model.loader import LoadedModel, load_model
from kvern.engine.startup import build_engine
from kvern.engine.tensor_parallel.shard import Shard

from . import tiny_models
from .engine_harness import EngineHarness
from .tiny_llama import PROMPT, load, logits_of, save_tiny

Reference = dict[tuple[int, ...], list[int]]
NAMES = ("int8", "int4")
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    save_tiny(path, attention_bias=True, tie_word_embeddings=True)
    return path


def distance(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())


def bits_by_layer(model: LoadedModel) -> dict[str, float]:
    """Return what each layer's weights take, in bits, scales and minima among them."""
    layers = {name: layer for name, layer in model.module.named_modules() if isinstance(layer, Linear)}
    packed = {name: layer.packed for name, layer in layers.items() if layer.packed is not None}
    assert packed.keys() == layers.keys()
    return {
        name.split(".")[-1]: 8 * weight.nbytes / (-(-weight.out_features // 64) * 64 * weight.in_features)
        for name, weight in packed.items()
    }


@pytest.mark.parametrize(("name", "bits", "at_most"), [("int8", 8.5, 0.06), ("int4", 5, 0.4)])
def test_projections_are_rounded_and_the_head_to_8_bits(plain: Path, name: str, bits: float, at_most: float) -> None:
    model, full = load(plain, quantization=name), load(plain)
    projections = dict.fromkeys(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), bits)
    assert bits_by_layer(model) == projections | {"lm_head": 8.5}
    assert model.num_parameters == full.num_parameters
    assert torch.equal(
        model.module.get_parameter("model.embed_tokens.weight"), full.module.get_parameter("model.embed_tokens.weight")
    )
    assert 0 < distance(logits_of(model), logits_of(full)) < at_most


def test_contract_and_summary_tell_how_weights_are_rounded(plain: Path) -> None:
    """Caches that were computed with other numbers must not be shared."""
    engines = [
        build_engine(load(plain, quantization=name), EngineConfig(plain, num_blocks=20)) for name in (None, *NAMES)
    ]
    assert len({engine.contract for engine in engines}) == len(engines)
    for engine, said in zip(engines, ("float32", "int8 and float32", "int4 and float32"), strict=True):
        assert any(f" in {said} on cpu" in line for line in engine.capacity.lines())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rank_of_two_holds_its_part(tmp_path: Path, dtype: str) -> None:
    save_tiny(tmp_path, intermediate_size=128)
    config = EngineConfig(tmp_path, device="cpu", dtype=dtype, quantization="int4")
    whole, part = load_model(config), load_model(config, shard=Shard(1, 2))
    assert whole.fingerprint == part.fingerprint
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(whole.dtype)
    projections = [model.module.get_submodule("model.layers.0.mlp.gate_up_proj") for model in (whole, part)]
    gates = [projection(x).chunk(2, dim=1)[0] for projection in projections]
    assert torch.equal(gates[0][:, 64:], gates[1])


def test_answers_with_4_bits_equal_those_of_weights_that_were_stored_so(
    smollm2_path: Path, reference_tokens: Reference
) -> None:
    """The packaged model's were rounded by llama.cpp. In chunks, beside each other."""
    config = EngineConfig(smollm2_path, device="cpu", dtype="float32", quantization="int4", max_num_batched_tokens=64)
    engine = EngineHarness(build_engine(load_model(config), replace(config, num_blocks=100, max_model_len=512)))
    prompts = sorted(reference_tokens, key=len)[:3]
    outcomes = [engine.add(prompt, NUM_TOKENS) for prompt in prompts]
    engine.run()
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert outcome.token_ids == reference_tokens[prompt][:NUM_TOKENS]


def test_answers_with_8_bits_do_not_depend_on_the_batch(smollm2_path: Path, reference_tokens: Reference) -> None:
    """D17. Beside each other, and alone; their first tokens are mostly those of weights that are not rounded."""
    config = EngineConfig(smollm2_path, device="cpu", dtype="float32", quantization="int8", num_blocks=100)
    config = replace(config, max_model_len=512, enable_prefix_caching=False)
    engine = EngineHarness(build_engine(load_model(config), config))
    prompts = sorted(reference_tokens, key=len)[:3]
    together = [engine.add(prompt, NUM_TOKENS) for prompt in prompts]
    engine.run()
    assert engine.generate(prompts[0], NUM_TOKENS).token_ids == together[0].token_ids
    assert (
        sum(each.token_ids[0] == reference_tokens[prompt][0] for each, prompt in zip(together, prompts, strict=True))
        >= 2
    )


@pytest.mark.parametrize("name", NAMES)
def test_gpu_is_refused(plain: Path, name: str) -> None:
    config = load(plain).config
    assert isinstance(config, ModelConfig)
    with pytest.raises(ConfigError, match=f"quantization: {name} is for a CPU; a GPU computes fp8"):
        with_integers(config, name, torch.device("cuda"))


def test_models_whose_weights_cannot_be_in_integers_are_refused(tmp_path: Path) -> None:
    tiny_models.save_tiny(tmp_path / "odd", "Llama")
    with pytest.raises(
        ConfigError, match="quantization: a layer of 48 inputs and 96 outputs cannot be in int4, where "
    ):
        load(tmp_path / "odd", quantization="int4")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    tiny_models.save_tiny(tmp_path / "experts", "Qwen3Moe", **experts)
    with pytest.raises(ConfigError, match="quantization: the experts of a Qwen3MoeForCausalLM cannot be in int8"):
        load(tmp_path / "experts", quantization="int8")
    tiny_models.save_tiny(tmp_path / "other", "Olmo2")
    with pytest.raises(ConfigError, match=r"quantization: Olmo2ForCausalLM is computed by .* can be in int8"):
        load(tmp_path / "other", quantization="int8")


def test_checkpoint_in_fp8_is_not_rounded_again(plain: Path) -> None:
    with pytest.raises(ConfigError, match="quantization: the checkpoint's weights are in fp8"):
        with_integers(load(plain, quantization="fp8").config, "int4", torch.device("cpu"))  # type: ignore[arg-type]


def test_prompt_of_a_tiny_model_gives_near_logits_in_bfloat16(plain: Path) -> None:
    logits = [logits_of(load(plain, dtype=dtype, quantization="int8"), PROMPT) for dtype in ("float32", "bfloat16")]
    assert 0 < distance(logits[1], logits[0]) < 0.1
