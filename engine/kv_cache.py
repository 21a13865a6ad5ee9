"""The KV cache: how large it can be, and the memory itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvern.engine.config import EngineConfig
from kvern.engine.errors import ConfigError
from kvern.engine.memory import available_bytes
from kvern.engine.model.config import ModelShape
from kvern.engine.model.loader import LoadedModel
from kvern.engine.sizes import GPU_UTILIZATION, kv_block_bytes, left_for_kv

logger = logging.getLogger(__name__)

_CPU_UTILIZATION = 0.25


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many KV blocks there are, and the longest request that they are promised to hold."""

    num_blocks: int
    max_model_len: int
    """Tokens, prompt and output together."""


def allocate_kv(model: LoadedModel, block_size: int, num_blocks: int) -> Tensor:
    """Return [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], not filled with anything.

    A block is one run of bytes over all layers, and a head's slice in it is one too. The operating system gives memory
    to a CPU's cache as it is first written.
    """
    shape = model.config
    return torch.empty(
        (num_blocks, shape.num_layers, 2, shape.num_kv_heads, block_size, shape.head_dim),
        dtype=model.kv_dtype,
        device=model.device,
    )


def size_pool(config: EngineConfig, model: LoadedModel, measure_use: Callable[[int], int] | None = None) -> PoolSize:
    """Decide the pool's size and the longest request.

    `num_blocks` decides, else `kv_cache_memory`, else `gpu_memory_utilization`. A longest request that was asked for
    and does not fit is refused with ConfigError; the model's own is cut to the pool with a warning. Ranks that share a
    model have equal pools, of which the least decides. measure_use: given the longest request, returns the bytes of the
    device that a running engine takes without its pool. None: they are in use already.
    """
    wanted_len = _wanted_model_len(config, model.config)
    num_blocks = model.shard.minimum(_num_blocks(config, model, wanted_len, measure_use))
    pool_tokens = num_blocks * config.block_size
    if wanted_len <= pool_tokens:
        return PoolSize(num_blocks, wanted_len)
    if config.max_model_len is not None:
        raise ConfigError("max_model_len", _too_long(config, wanted_len, pool_tokens))
    logger.warning("max_model_len: %s", _too_long(config, wanted_len, pool_tokens))
    return PoolSize(num_blocks, pool_tokens)


def _wanted_model_len(config: EngineConfig, model: ModelShape) -> int:
    trained = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > trained:
        raise ConfigError("max_model_len", f"{config.max_model_len} is above the model's trained length, {trained}")
    return config.max_model_len or trained


def _num_blocks(
    config: EngineConfig, model: LoadedModel, model_len: int, measure_use: Callable[[int], int] | None
) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    block_bytes = kv_block_bytes(model.config, config.block_size, model.kv_dtype.itemsize)
    field = "kv_cache_memory" if config.kv_cache_memory is not None else "gpu_memory_utilization"
    kv_bytes = config.kv_cache_memory
    if kv_bytes is None:
        kv_bytes = _kv_bytes(config, model, None if measure_use is None else partial(measure_use, model_len))
    if kv_bytes < block_bytes:
        raise ConfigError(field, f"{kv_bytes} bytes for KV do not hold one block of {block_bytes} bytes")
    num_blocks = kv_bytes // block_bytes
    if config.kv_cache_memory is None and model.device.type == "cpu":
        # A CPU's memory is not the engine's alone: what no set of running requests can fill is left to others.
        num_blocks = min(num_blocks, config.max_num_seqs * -(-model_len // config.block_size))
    return num_blocks


def _kv_bytes(config: EngineConfig, model: LoadedModel, measure_use: Callable[[], int] | None) -> int:
    """Return the share of memory that is for KV: of what is available now, or on a GPU of all less what is in use."""
    share = config.gpu_memory_utilization
    if model.device.type == "cpu":
        return int(available_bytes() * (_CPU_UTILIZATION if share is None else share)) // model.shard.size
    free, total = torch.cuda.mem_get_info(model.device)
    used = total - free if measure_use is None else measure_use()
    return left_for_kv(total, GPU_UTILIZATION if share is None else share, used)


def _too_long(config: EngineConfig, wanted_len: int, pool_tokens: int) -> str:
    setting = "num_blocks" if config.num_blocks is not None else "kv_cache_memory"
    return (
        f"a request of {wanted_len} tokens does not fit the KV pool, which holds {pool_tokens}; "
        f"lower max_model_len to {pool_tokens} or raise {setting}"
    )
