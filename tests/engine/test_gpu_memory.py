"""How KV is sized on a GPU, as far as no GPU is needed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from kvern.engine.config import EngineConfig
from kvern.engine.errors import ConfigError
from kvern.engine.gpu_memory import (
    largest_lengths,
    make_or_shrink,
    plan_of,
    run_largest,
    used_beside_pool,
)
from kvern.engine.gpu_support import check_driver_version, check_kernels
from kvern.engine.kv_cache import PoolSize
from kvern.engine.plan import Plan
from kvern.engine.runner import ModelRunner
from kvern.engine.sizes import left_for_kv
from kvern.engine.submission import StepSubmission

from .tiny_llama import load, save_tiny

GIB = 2**30


def test_the_largest_step_has_all_tokens_and_all_sequences() -> None:
    assert largest_lengths(2048, 64, 4096) == [32] * 64
    assert largest_lengths(10, 4, 4096) == [3, 3, 2, 2]
    assert largest_lengths(3, 64, 4096) == [1, 1, 1]
    assert largest_lengths(2048, 2, 100) == [100, 100]


def test_its_requests_are_sampled_and_write_one_block_only() -> None:
    plan = plan_of([17, 3], block_size=16)
    assert [entry.request.block_ids for entry in plan.entries] == [[0, 0], [0]]
    assert all(entry.samples and entry.end == entry.request.num_tokens for entry in plan.entries)


def test_the_largest_step_runs_and_leaves_no_request(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = EngineConfig(tmp_path, max_num_seqs=3, max_num_batched_tokens=50)
    runner = ModelRunner(load(tmp_path), config, num_blocks=1, max_model_len=256)
    steps: list[Plan] = []

    class Watched:
        def submit(self, plan: Plan) -> StepSubmission:
            steps.append(plan)
            return runner.submit(plan)

    for _ in range(2):  # a request that stayed would have the slots of the second step
        run_largest(Watched(), config, 256)
    assert [step.num_tokens for step in steps] == [50, 0, 50, 0]


def test_kv_gets_the_share_less_what_a_running_engine_uses() -> None:
    used = used_beside_pool(free_bytes=60 * GIB, total_bytes=80 * GIB, pool_bytes=2 * GIB)
    assert used == 18 * GIB
    assert left_for_kv(80 * GIB, 0.9, used) == 54 * GIB


def test_running_out_of_memory_shrinks_the_pool_once_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    tried = []

    def make(pool: PoolSize) -> str:
        tried.append(pool)
        if pool.num_blocks > 95:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "made"

    with caplog.at_level(logging.WARNING):
        assert make_or_shrink(PoolSize(100, 1600), 16, make) == ("made", PoolSize(95, 1520))
    assert tried == [PoolSize(100, 1600), PoolSize(95, 1520)]
    assert "out of memory with 100 KV blocks: trying 95, with requests of up to 1520 tokens" in caplog.text


def test_running_out_of_memory_twice_is_an_error() -> None:
    def make(pool: PoolSize) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        make_or_shrink(PoolSize(100, 1600), 16, make)


@pytest.mark.parametrize(
    ("capability", "head_dim", "message"),
    [
        ((7, 5), 128, "device: the GPU's compute capability is 7.5; 8.0 is the least"),
        ((8, 0), 512, "attention_backend: a head size of 512 has no configuration; 256 is the largest that has"),
    ],
)
def test_a_gpu_without_kernels_is_refused_with_the_reason(
    capability: tuple[int, int], head_dim: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_kernels(capability, 2, head_dim)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_gpus_from_8_0_on_are_taken(capability: tuple[int, int]) -> None:
    check_kernels(capability, 2, 128)


def test_a_driver_of_an_older_major_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device: the GPU's driver supports CUDA up to 12.4; this torch needs 13.0"):
        check_driver_version(12040, "13.0")
    check_driver_version(12040, "12.8")  # drivers serve their major version
    check_driver_version(0, "13.0")  # no GPU
