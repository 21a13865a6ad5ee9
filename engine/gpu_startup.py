"""From a loaded model to a runner on a GPU: graphs captured, memory measured, kernels compiled."""

from __future__ import annotations

from functools import partial

import torch

from kvern.engine.compilations import CompilationWatch
from kvern.engine.config import EngineConfig
from kvern.engine.cuda_graphs import CudaCapture, Progress
from kvern.engine.gpu_memory import (
    TRIAL_BLOCKS,
    make_or_shrink,
    release_unused,
    run_largest,
    run_lengths,
    run_under_grammar,
    used_beside_pool,
)
from kvern.engine.gpu_support import check_gpu
from kvern.engine.kv_cache import PoolSize, size_pool
from kvern.engine.model.loader import LoadedModel
from kvern.engine.runner import ModelRunner

_SMALL_STEPS = ([1], [3], [2, 1])
"""Lengths of prompts of steps beside the largest one, for which Triton compiles other variants."""


def build_gpu_runner(model: LoadedModel, config: EngineConfig, progress: Progress) -> tuple[ModelRunner, PoolSize]:
    """Build a runner that compiles nothing more. Raises ConfigError where GPU, settings and memory do not fit."""
    check_gpu(model.device, model.kv_dtype, model.config.head_dim)
    make = partial(_make_runner, model, config, progress)
    pool = size_pool(config, model, partial(_measure_use, model, config, progress))
    if model.shard.size > 1:  # ranks that shrink alone would no longer fit together
        runner = make(pool)
    else:
        runner, pool = make_or_shrink(pool, config.block_size, make)
    CompilationWatch().start()
    return runner, pool


def _measure_use(model: LoadedModel, config: EngineConfig, progress: Progress, max_model_len: int) -> int:
    """Return the bytes in use beside the pool once the largest step has run."""
    runner = _make_runner(model, config, progress, PoolSize(TRIAL_BLOCKS, max_model_len))
    free_bytes, total_bytes = torch.cuda.mem_get_info(model.device)
    used_bytes = used_beside_pool(free_bytes, total_bytes, runner.kv_bytes)
    del runner
    release_unused()
    return used_bytes


def _make_runner(model: LoadedModel, config: EngineConfig, progress: Progress, pool: PoolSize) -> ModelRunner:
    runner = ModelRunner(model, config, pool.num_blocks, pool.max_model_len)
    if runner.can_capture and not config.enforce_eager:
        runner.capture(CudaCapture(), progress)
    for lengths in _SMALL_STEPS:
        run_lengths(runner, config, lengths)
    run_under_grammar(runner, config)
    run_largest(runner, config, pool.max_model_len)
    return runner
