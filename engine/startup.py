"""From a configuration to an engine that is ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvern.engine.block_pool import BlockPool
from kvern.engine.config import EngineConfig
from kvern.engine.contract import cache_contract
from kvern.engine.core import EngineCore
from kvern.engine.errors import RankLost
from kvern.engine.gpu_startup import build_gpu_runner
from kvern.engine.kv_cache import PoolSize, size_pool
from kvern.engine.model.loader import LoadedModel, load_model
from kvern.engine.plan import Runner
from kvern.engine.runner import ModelRunner
from kvern.engine.scheduler import Policy, Scheduler, SchedulerConfig
from kvern.engine.sizes import kv_block_bytes
from kvern.engine.summary import Capacity
from kvern.engine.tensor_parallel.leader import LeadingRunner, Workers
from kvern.engine.tensor_parallel.shard import Shard

Progress = Callable[[float, str], None]
"""Told how far loading is (0 to 1) and what is being done."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded engine, and what its service says of it."""

    core: EngineCore
    scheduler: Scheduler
    runner: Runner
    capacity: Capacity
    contract: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    workers: Workers | None = None
    """The other ranks, where the model is shared out."""

    def close(self) -> None:
        """End the other ranks. The engine must not be running."""
        if self.workers is not None:
            self.workers.close()


def start_engine(
    config: EngineConfig, progress: Progress | None = None, on_lost: Callable[[RankLost], object] | None = None
) -> Engine:
    """Load the model and build an engine around it. Raises ModelError, ConfigError or RankLost.

    on_lost: told, on a thread of its own, when another rank is gone; until then the engine may wait for it.
    """
    if config.tensor_parallel_size == 1:
        return build_engine(load_model(config, progress), config, progress=progress)
    config = _with_threads_for_each_rank(config)
    workers = Workers(config, on_lost)
    try:
        model = load_model(config, progress, Shard(0, config.tensor_parallel_size))
        workers.join(model.device)
        with workers.guarded():
            return build_engine(model, config, workers, progress)
    except BaseException:
        workers.close()
        raise


def _with_threads_for_each_rank(config: EngineConfig) -> EngineConfig:
    """Return `config` with each rank's part of a CPU's threads, unless they are given."""
    if config.num_threads is not None:
        return config
    num_threads = min(torch.get_num_threads(), config.max_threads or torch.get_num_threads())
    return replace(config, num_threads=max(1, num_threads // config.tensor_parallel_size))


def build_runner(
    model: LoadedModel, config: EngineConfig, progress: Progress | None = None
) -> tuple[ModelRunner, PoolSize]:
    """Build what runs steps. Ranks that share a model do so together."""
    if model.device.type == "cuda":
        return build_gpu_runner(model, config, progress or _no_progress)
    pool_size = size_pool(config, model)
    return ModelRunner(model, config, pool_size.num_blocks, pool_size.max_model_len), pool_size


def build_engine(
    model: LoadedModel, config: EngineConfig, workers: Workers | None = None, progress: Progress | None = None
) -> Engine:
    """Build an engine around a loaded model. Raises ConfigError where the settings do not fit model or memory."""
    runner, pool_size = build_runner(model, config, progress)
    leading: Runner = runner if workers is None else LeadingRunner(runner, workers)
    contract = _contract_of(model, config)
    scheduler_config = SchedulerConfig(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=pool_size.max_model_len,
        eos_token_ids=model.eos_token_ids,
        contract=contract,
        digest_key=config.digest_key,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=Policy(config.scheduling_policy),
        target_step_s=None if config.target_step_ms is None else config.target_step_ms / 1000,
        told_salt=config.told_salt,
    )
    pool = BlockPool(pool_size.num_blocks, record_events=config.record_cache_events)
    scheduler = Scheduler(pool, scheduler_config)
    return Engine(
        core=EngineCore(scheduler, leading, depth=1 if model.device.type == "cuda" else 0),
        scheduler=scheduler,
        runner=leading,
        capacity=capacity_of(model, config, pool_size, runner),
        contract=contract,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.eos_token_ids,
        workers=workers,
    )


def _contract_of(model: LoadedModel, config: EngineConfig) -> str:
    scales = b"" if model.kv_scales is None else model.kv_scales.cpu().numpy().tobytes()
    return cache_contract(
        model_fingerprint=model.fingerprint,
        dtype=_name_of(model.dtype),
        kv_dtype=_name_of(model.kv_dtype),
        block_size=config.block_size,
        kv_scales=scales,
        digest_key=config.digest_key,
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def capacity_of(
    model: LoadedModel, config: EngineConfig, pool: PoolSize, runner: ModelRunner | None = None
) -> Capacity:
    """Return what the model and its pool take, and how the runner computes."""
    graphs = None if runner is None else runner.graphs
    return Capacity(
        model_path=str(model.path),
        architecture=model.config.architecture,
        num_parameters=model.num_parameters,
        weight_bytes=model.weight_bytes,
        dtype=_name_of(model.dtype),
        quantization=model.quantization,
        device=str(model.device),
        kv_dtype=_name_of(model.kv_dtype),
        kv_bytes=pool.num_blocks * kv_block_bytes(model.config, config.block_size, model.kv_dtype.itemsize),
        block_size=config.block_size,
        num_blocks=pool.num_blocks,
        max_model_len=pool.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        num_ranks=model.shard.size,
        attention_backend=None if runner is None else runner.attention_backend,
        num_graphs=0 if graphs is None else 2 * len(graphs.buckets),
        capture_s=0.0 if graphs is None else graphs.capture_s,
    )


def _no_progress(share: float, what: str) -> None:
    """Tell nobody."""
