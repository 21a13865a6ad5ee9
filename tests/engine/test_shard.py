"""Models in two shards: the same logits as whole, whatever is cut and however it is stored."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern.engine.config import EngineConfig
from kvern.engine.errors import ConfigError, ModelError
from kvern.engine.model.config import ModelConfig
from kvern.engine.model.loader import load_model
from kvern.engine.tensor_parallel.group import join, leave
from kvern.engine.tensor_parallel.shard import Shard, shard_config

from . import other_rank, tiny_models
from .other_rank import shard_logits
from .tiny_gguf import gguf_tensors, write_gguf
from .tiny_llama import PROMPT, edit_json, make_tiny
from .tiny_llama import save_tiny as save_llama


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    """The way to a second rank; the test's own process is the first."""
    rendezvous = tmp_path_factory.mktemp("ranks") / "rendezvous"
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        command = [sys.executable, other_rank.__file__, str(theirs.fileno()), str(rendezvous)]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    join(Shard(0, 2), torch.device("cpu"), rendezvous)
    yield ours
    ours.send(None)
    leave()
    assert process.wait(30) == 0


def assert_same_in_two_shards(path: Path, other: Connection) -> None:
    expected = shard_logits(path, Shard(), PROMPT)
    other.send((path, PROMPT))
    actual = shard_logits(path, Shard(0, 2), PROMPT)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


QWEN3_MOE = {"moe_intermediate_size": 32, "num_experts": 5, "num_experts_per_tok": 2, "mlp_only_layers": [1]}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("Phi3", {}),
        ("Gemma2", {"head_dim": 12, "query_pre_attn_scalar": 12, "final_logit_softcapping": 5.0}),
        ("Qwen3Moe", QWEN3_MOE | {"head_dim": 12}),
        ("Mixtral", {"num_local_experts": 4}),
    ],
    ids=["biases", "tied, one KV head", "fused weights", "sandwich norms, caps", "experts in two of three", "mixtral"],
)
def test_logits_of_two_shards_are_those_of_the_whole(
    tmp_path: Path, other: Connection, name: str, config: dict[str, Any]
) -> None:
    """I09: what has fewer KV heads than ranks has them on several."""
    tiny_models.save_tiny(tmp_path, name, **config)
    assert_same_in_two_shards(tmp_path, other)


def test_logits_of_a_gguf_in_two_shards_are_those_of_the_whole(tmp_path: Path, other: Connection) -> None:
    path = write_gguf(tmp_path / "model.gguf", gguf_tensors(make_tiny()))
    assert_same_in_two_shards(path, other)


@pytest.mark.parametrize(("ours", "theirs"), [(9, 7), (7, 9)])
def test_minimum_is_the_least_of_the_ranks_numbers(other: Connection, ours: int, theirs: int) -> None:
    other.send(theirs)
    assert Shard(0, 2).minimum(ours) == 7


def config_of(num_heads: int, num_kv_heads: int, intermediate_size: int = 1536) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=50,
        num_layers=1,
        num_kv_heads=num_kv_heads,
        head_dim=4,
        max_position_embeddings=64,
        sliding_windows=(None,),
        hidden_size=8,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        rms_norm_eps=1e-5,
        ropes=(None,),
        attention_scale=1.0,
        tie_word_embeddings=False,
    )


@pytest.mark.parametrize(
    ("config", "size", "sizes"),
    [
        (config_of(9, 3), 2, "1, 3"),
        (config_of(12, 4), 6, "1, 2, 4, 12"),
        (config_of(8, 8, intermediate_size=12), 8, "1, 2, 4"),
        (config_of(8, 2), 3, "1, 2, 4, 8"),
    ],
)
def test_size_that_does_not_divide_a_model_is_refused_naming_those_that_do(
    config: ModelConfig, size: int, sizes: str
) -> None:
    """I09."""
    with pytest.raises(
        ConfigError, match=rf"{size} ranks cannot share .* evenly; sizes that can are {sizes}$"
    ) as raised:
        shard_config(config, Shard(0, size))
    assert raised.value.field == "tensor_parallel_size"
    for each in map(int, sizes.split(", ")):
        local = shard_config(config, Shard(0, each))
        assert (local.num_heads * each, local.intermediate_size * each) == (config.num_heads, config.intermediate_size)
        assert local.num_kv_heads == max(1, config.num_kv_heads // each)


def test_model_that_transformers_computes_is_refused_in_shards(tmp_path: Path) -> None:
    save_llama(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["GPT2LMHeadModel"])
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size: .*GPT2LMHeadModel runs on one device"):
        load_model(EngineConfig(tmp_path, device="cpu"), shard=Shard(0, 2))


def test_tensor_that_cannot_be_cut_evenly_is_refused_by_name(tmp_path: Path) -> None:
    save_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file(load_file(file) | {name: torch.zeros(63, 64)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"tensor {name} is \[63, 64\], which cannot be cut into 2 equal parts"):
        load_model(EngineConfig(tmp_path, device="cpu"), shard=Shard(0, 2))


@pytest.mark.parametrize(("vocab_size", "parts"), [(97, [(0, 49), (49, 97)]), (1, [(0, 1), (1, 1)])])
def test_parts_of_a_vocabulary_cover_it_once(vocab_size: int, parts: list[tuple[int, int]]) -> None:
    slices = [Shard(rank, 2).vocabulary(vocab_size) for rank in range(2)]
    assert [(part.start, part.stop) for part in slices] == parts
