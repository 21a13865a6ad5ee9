"""`kvern capacity` against engines that were started."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner

from kvern.cli import kvern
from kvern.cli.capacity import CONTEXT_BYTES, GPU_GIGABYTES
from kvern.engine.config import EngineConfig
from kvern.engine.model.causal_lm import CausalLM
from kvern.engine.model.hf_config import ARCHITECTURES, model_config_of
from kvern.engine.sizes import num_parameters
from kvern.engine.startup import start_engine

_TINY = {
    "vocab_size": 113,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "Qwen3MoeForCausalLM": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "Phi3ForCausalLM": {"pad_token_id": 0},
}

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

PUBLIC: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **dict(zip(_SIZES, (576, 1536, 30, 9), strict=True)),
    },
    "Llama-3.1-8B": _LLAMA | dict(zip(_SIZES, (4096, 14336, 32, 32), strict=True)),
    "Qwen3-8B": _QWEN3 | dict(zip(_SIZES, (4096, 12288, 36, 32), strict=True)),
    "Qwen3-32B": _QWEN3 | dict(zip(_SIZES, (5120, 25600, 64, 64), strict=True)),
    "Llama-3.3-70B": _LLAMA | dict(zip(_SIZES, (8192, 28672, 80, 64), strict=True)),
}
"""What the public configurations of these models say of their size."""

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def run(*arguments: str | Path) -> dict[str, Any]:
    done = CliRunner().invoke(kvern, ["capacity", *map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.output)
    return answer


def refusal(*arguments: str | Path) -> str:
    done = CliRunner().invoke(kvern, ["capacity", *map(str, arguments)])
    assert done.exit_code != 0
    return done.output


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    """A folder with the public configuration of Llama 3.1 8B, and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC["Llama-3.1-8B"]))
    return tmp_path


def test_capacity_is_what_a_started_engine_says(smollm2_path: Path) -> None:
    config = EngineConfig(model_path=smollm2_path, kv_cache_memory=64 << 20)
    started = start_engine(config).capacity
    told = run("smollm2", "--kv-cache-memory", "64MiB")
    for name in ("num_parameters", "weight_bytes", "dtype", "kv_bytes", "block_size", "num_blocks", "max_model_len"):
        assert told[name] == getattr(started, name), name
    assert told["num_tokens"] == started.num_tokens


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_from_the_configuration_are_those_of_the_module(architecture: str) -> None:
    values = _TINY | _VARIANTS.get(architecture, {})
    raw = getattr(transformers, architecture).config_class(**values).to_dict() | {"architectures": [architecture]}
    config = model_config_of(raw, architecture)
    with torch.device("meta"):
        module = CausalLM(config)
    assert num_parameters(config) == sum(parameter.numel() for parameter in module.parameters())


def test_capacity_of_a_gpu_is_its_share_without_weights(llama_8b: Path) -> None:
    told = run(llama_8b, "--gpu", "h100", "--gpu-memory-utilization", "0.8", "--context", "1000")
    token_bytes = 32 * 2 * 8 * 128 * 2
    left = int(GPU_GIGABYTES["h100"] * 10**9 * 0.8) - CONTEXT_BYTES - told["weight_bytes"]
    assert told["num_parameters"] == 8_030_261_248
    assert (told["dtype"], told["weight_bytes"]) == ("bfloat16", 2 * 8_030_261_248)
    assert told["num_blocks"] == left // (16 * token_bytes)
    assert told["num_requests"] == told["num_blocks"] // 63


@pytest.mark.parametrize("options", [("--quantization", "fp8"), ("--kv-cache-dtype", "fp8")])
def test_capacity_in_fp8_is_what_a_started_engine_says(smollm2_path: Path, options: tuple[str, str]) -> None:
    field, value = options[0].removeprefix("--").replace("-", "_"), options[1]
    started = start_engine(EngineConfig(smollm2_path, kv_cache_memory=64 << 20, **{field: value})).capacity
    told = run("smollm2", "--kv-cache-memory", "64MiB", *options)
    for name in ("num_parameters", "weight_bytes", "quantization", "kv_dtype", "kv_bytes", "num_blocks"):
        assert told[name] == getattr(started, name), name


def test_capacity_of_a_gpu_in_fp8_holds_twice_the_tokens_beside_half_the_projections(llama_8b: Path) -> None:
    plain, kv, weights = (
        run(llama_8b, "--gpu", "h100", *options)
        for options in ((), ("--kv-cache-dtype", "fp8"), ("--quantization", "fp8"))
    )
    assert kv["kv_block_bytes"] * 2 == plain["kv_block_bytes"]
    projections = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    scales = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert weights["weight_bytes"] == plain["weight_bytes"] - projections + 4 * scales
    four = run(llama_8b, "--gpu", "h100", "--quantization", "fp8", "--tensor-parallel", "4")
    assert four["weight_bytes"] * 4 == weights["weight_bytes"]


def test_experts_in_fp8_are_refused(tmp_path: Path) -> None:
    raw = _TINY | _VARIANTS["Qwen3MoeForCausalLM"]
    config = transformers.Qwen3MoeConfig(**raw).to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "experts cannot be in fp8" in refusal(tmp_path, "--gpu", "l4", "--quantization", "fp8")


def test_capacity_of_several_gpus_shares_weights_and_heads(llama_8b: Path) -> None:
    one, four = (run(llama_8b, "--gpu", "a10", "--tensor-parallel", str(count)) for count in (1, 4))
    assert four["weight_bytes"] * 4 == one["weight_bytes"]
    assert four["kv_block_bytes"] * 4 == one["kv_block_bytes"]
    sixteen = run(llama_8b, "--gpu", "a10", "--tensor-parallel", "16")
    assert sixteen["kv_block_bytes"] * 8 == one["kv_block_bytes"], "a KV head is not divided"
    assert "32 heads and 8 KV heads" in refusal(llama_8b, "--gpu", "a10", "--tensor-parallel", "3")


def test_longest_request_is_cut_to_what_fits_unless_asked_for(llama_8b: Path) -> None:
    assert run(llama_8b, "--gpu", "h100")["max_model_len"] == 131072
    assert run(llama_8b, "--kv-cache-memory", "1GiB")["max_model_len"] == (1 << 30) // 131072
    assert "8192 that fit" in refusal(llama_8b, "--kv-cache-memory", "1GiB", "--max-model-len", "8193")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "how much memory?"),
        (("--gpu-memory", "1 parsec"), "'1 parsec' is no number of bytes"),
        (("--gpu-memory", "16GB"), "nothing is left for KV beside 14.96 GiB of weights"),
        (("--gpu", "abacus"), "'abacus' is not one of"),
    ],
)
def test_what_cannot_be_told_is_refused_with_its_reason(llama_8b: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in refusal(llama_8b, *arguments)


def test_architecture_that_only_transformers_knows_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BloomForCausalLM"]}')
    assert "BloomForCausalLM" in refusal(tmp_path, "--gpu", "l4")


def cell(config: dict[str, Any], gpu: str, num_gpus: int, folder: Path) -> str:
    """Return blocks and requests as the table of sizes has them, a dash where weights do not fit."""
    (folder / "config.json").write_text(json.dumps(config))
    arguments = ["capacity", str(folder), "--gpu", gpu, "--tensor-parallel", str(num_gpus), "--json"]
    done = CliRunner().invoke(kvern, arguments)
    if done.exit_code:
        return "-"
    told = json.loads(done.output)
    return f"{told['num_blocks']:,} / {told['num_requests']:,}"


def test_table_of_sizes_is_what_the_command_says(tmp_path: Path) -> None:
    """Of docs/operations.md."""
    lines = [line for line in OPERATIONS.read_text().splitlines() if line.startswith("|")]
    start = next(place for place, line in enumerate(lines) if "a100-40gb" in line)
    gpus = re.findall(r"[\w-]+", lines[start])[1:]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines[start + 2 : start + 9]]
    assert gpus == [*GPU_GIGABYTES]
    assert {row[0].partition(" x ")[0] for row in rows} == {*PUBLIC}
    for name, *cells in rows:
        model, _, count = name.partition(" x ")
        assert cells == [cell(PUBLIC[model], gpu, int(count or 1), tmp_path) for gpu in gpus], name
