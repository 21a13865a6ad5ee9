"""From a configuration to an engine that is ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvern.engine.block_pool import BlockPool
from kvern.engine.config import EngineConfig
from kvern.engine.contract import cache_contract
from kvern.engine.core import EngineCore
from kvern.engine.kv_cache import PoolSize, size_pool
from kvern.engine.model.loader import LoadedModel, load_model
from kvern.engine.runner import ModelRunner
from kvern.engine.scheduler import Policy, Scheduler, SchedulerConfig
from kvern.engine.sizes import kv_block_bytes
from kvern.engine.summary import Capacity

Progress = Callable[[float, str], None]
"""Told how far loading is (0 to 1) and what is being done."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded engine, and what its service says of it."""

    core: EngineCore
    scheduler: Scheduler
    runner: ModelRunner
    capacity: Capacity
    contract: str
    vocab_size: int
    eos_token_ids: frozenset[int]


def start_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Load the model and build an engine around it. Raises ModelError or ConfigError."""
    return build_engine(load_model(config, progress), config)


def build_engine(model: LoadedModel, config: EngineConfig) -> Engine:
    """Build an engine around a loaded model. Raises ConfigError where the settings do not fit model or memory."""
    pool_size = size_pool(config, model)
    dtype = str(model.dtype).removeprefix("torch.")
    contract = cache_contract(
        model_fingerprint=model.fingerprint, dtype=dtype, kv_dtype=dtype, block_size=config.block_size
    )
    scheduler_config = SchedulerConfig(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=pool_size.max_model_len,
        eos_token_ids=model.eos_token_ids,
        contract=contract,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=Policy(config.scheduling_policy),
        target_step_s=None if config.target_step_ms is None else config.target_step_ms / 1000,
    )
    pool = BlockPool(pool_size.num_blocks, record_events=config.record_cache_events)
    scheduler = Scheduler(pool, scheduler_config)
    runner = ModelRunner(model, config, pool_size.num_blocks, pool_size.max_model_len)
    return Engine(
        core=EngineCore(scheduler, runner),
        scheduler=scheduler,
        runner=runner,
        capacity=capacity_of(model, config, pool_size),
        contract=contract,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )


def capacity_of(model: LoadedModel, config: EngineConfig, pool: PoolSize) -> Capacity:
    """Return what the model and its pool take."""
    return Capacity(
        model_path=str(model.path),
        architecture=model.config.architecture,
        num_parameters=model.num_parameters,
        weight_bytes=model.weight_bytes,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        kv_bytes=pool.num_blocks * kv_block_bytes(model.config, config.block_size, model.dtype.itemsize),
        block_size=config.block_size,
        num_blocks=pool.num_blocks,
        max_model_len=pool.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
    )
