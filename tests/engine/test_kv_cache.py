"""How large the KV pool is made, and which settings are refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern.engine import kv_cache
from kvern.engine.config import EngineConfig
from kvern.engine.errors import ConfigError
from kvern.engine.kv_cache import PoolSize, allocate_kv, size_pool
from kvern.engine.memory import available_bytes
from kvern.engine.model.loader import LoadedModel
from kvern.engine.sizes import kv_block_bytes
from kvern.engine.startup import capacity_of

from .tiny_llama import load, save_tiny

TRAINED_LEN = 256
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4
"""2 layers, keys and values, 2 KV heads, 16 tokens, 16 dimensions, 4 bytes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path)
    return load(path)


def sized(model: LoadedModel, **options: Any) -> PoolSize:
    return size_pool(EngineConfig(model_path=model.path, **options), model)


def test_block_bytes_are_those_of_the_memory_allocated(model: LoadedModel) -> None:
    kv = allocate_kv(model, 16, 7)
    assert kv.shape == (7, 2, 2, 2, 16, 16)
    assert kv.nbytes == 7 * BLOCK_BYTES
    assert kv_block_bytes(model.config, 16, torch.float32.itemsize) == BLOCK_BYTES
    assert kv_block_bytes(model.config, 32, torch.bfloat16.itemsize) == BLOCK_BYTES


def test_num_blocks_decides_before_memory(model: LoadedModel) -> None:
    assert sized(model, num_blocks=500, kv_cache_memory=BLOCK_BYTES) == PoolSize(500, TRAINED_LEN)


def test_kv_cache_memory_decides_before_utilization(model: LoadedModel) -> None:
    size = sized(model, kv_cache_memory=100 * BLOCK_BYTES + 5, gpu_memory_utilization=1e-9)
    assert size == PoolSize(100, TRAINED_LEN)


def test_default_on_a_cpu_is_no_more_than_full_requests_can_fill(model: LoadedModel) -> None:
    assert sized(model, max_num_seqs=3) == PoolSize(3 * 16, TRAINED_LEN)
    assert sized(model, max_num_seqs=3, max_model_len=100) == PoolSize(3 * 7, 100)


def test_utilization_on_a_cpu_is_a_share_of_what_is_available(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "available_bytes", lambda: 10_000 * BLOCK_BYTES)
    assert sized(model, gpu_memory_utilization=0.25, max_num_seqs=10**9) == PoolSize(2500, TRAINED_LEN)


def test_max_model_len_above_the_trained_length_is_refused(model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="max_model_len: 257 is above the model's trained length, 256"):
        sized(model, max_model_len=257)


def test_max_model_len_above_the_pool_is_refused_naming_what_to_change(model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="holds 160; lower max_model_len to 160 or raise num_blocks"):
        sized(model, max_model_len=161, num_blocks=10)
    with pytest.raises(ConfigError, match="holds 160; lower max_model_len to 160 or raise kv_cache_memory"):
        sized(model, max_model_len=161, kv_cache_memory=10 * BLOCK_BYTES)
    assert sized(model, max_model_len=160, num_blocks=10) == PoolSize(10, 160)


def test_trained_length_above_the_pool_is_cut_with_a_warning(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert sized(model, num_blocks=10) == PoolSize(10, 160)
    assert "a request of 256 tokens does not fit the KV pool, which holds 160" in caplog.text


def test_memory_for_less_than_a_block_is_refused(model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=rf"kv_cache_memory: .*one block of {BLOCK_BYTES} bytes"):
        sized(model, kv_cache_memory=BLOCK_BYTES - 1)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization: .*one block"):
        sized(model, gpu_memory_utilization=1e-9)


def test_capacity_says_what_the_engine_holds(model: LoadedModel) -> None:
    config = EngineConfig(model_path=model.path, num_blocks=40, max_model_len=250, max_num_seqs=5)
    capacity = capacity_of(model, config, size_pool(config, model))
    assert (capacity.num_tokens, capacity.num_full_requests) == (640, 2.5)
    assert (capacity.kv_bytes, capacity.weight_bytes) == (40 * BLOCK_BYTES, 4 * model.num_parameters)
    text = "\n".join(capacity.lines())
    for part in (
        str(model.path),
        "LlamaForCausalLM",
        "float32 on cpu",
        "40 blocks of 16 tokens, 640 tokens, 2.5 requests of 250 tokens",
        "max_num_seqs 5",
        "prefix caching on",
    ):
        assert part in text


def machine(folder: Path, available_kib: int) -> Path:
    meminfo = folder / "meminfo"
    meminfo.write_text(f"MemTotal: 9999 kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\n")
    return meminfo


def test_available_bytes_without_a_limit_are_the_machines(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(machine(tmp_path, 1000), tmp_path) == 1000 * 1024


def test_available_bytes_under_a_limit_are_what_it_leaves(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("300000\n")
    (tmp_path / "memory.stat").write_text("anon 200000\ninactive_file 100000\n")
    assert available_bytes(machine(tmp_path, 1000), tmp_path) == 300_000
    assert available_bytes(machine(tmp_path, 100), tmp_path) == 100 * 1024


def test_available_bytes_under_a_version_1_limit_are_what_it_leaves(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("500000\n")
    (folder / "memory.usage_in_bytes").write_text("300000\n")
    (folder / "memory.stat").write_text("cache 1\ntotal_inactive_file 50000\n")
    assert available_bytes(machine(tmp_path, 1000), tmp_path) == 250_000
