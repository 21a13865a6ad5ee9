"""How much of a GPU's memory is left for KV: measured, by running the largest step there may be.

A trial engine with a pool of one block captures its graphs and runs that step, in which all sequences write the same
block. What is then in use, other processes included, is what the pool has to leave.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from kvern.engine.config import EngineConfig
from kvern.engine.kv_cache import PoolSize
from kvern.engine.plan import Plan, PlanEntry, Runner
from kvern.engine.request import Request, SamplingParams, StoppingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

TRIAL_BLOCKS = 1
_SHRUNK_SHARE = 0.95
"""Of the blocks that there was no memory for."""

_T = TypeVar("_T")


def largest_lengths(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> list[int]:
    """Return the lengths of prompts that fill a step as far as may be: in tokens, then in sequences."""
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    each, more = divmod(max_num_batched_tokens, num_seqs)
    return [min(max_model_len, each + (number < more)) for number in range(num_seqs)]


def plan_of(lengths: Sequence[int], block_size: int) -> Plan:
    """Return a step of prompts of these lengths, which ask for all that takes memory. Their blocks are all 0.

    A block is copied, too.
    """
    sampling = SamplingParams(top_p=0.9, top_k=20, min_p=0.01, presence_penalty=0.1, logprobs=20, logit_bias={0: 1.0})
    entries = []
    for number, length in enumerate(lengths):
        request = Request(number, [0] * length, length, sampling, StoppingParams(1))
        request.block_ids = [0] * -(-length // block_size)
        entries.append(PlanEntry(request, 0, length, samples=True))
    return Plan(entries, block_copies=[(0, 0)])


def run_largest(runner: Runner, config: EngineConfig, max_model_len: int) -> None:
    """Run a step as large as there may be."""
    run_lengths(runner, config, largest_lengths(config.max_num_batched_tokens, config.max_num_seqs, max_model_len))


def run_lengths(runner: Runner, config: EngineConfig, lengths: Sequence[int]) -> None:
    """Run a step of as many of these prompts as there may be, and wait. The runner then knows of no request."""
    _run(runner, plan_of(lengths[: config.max_num_seqs], config.block_size))


def run_under_grammar(runner: Runner, config: EngineConfig) -> None:
    """Run a step with a grammar and min_tokens, which is sampled piece by piece: its mask is a kernel of its own."""
    plan = plan_of([1], config.block_size)
    request = plan.entries[0].request
    request.grammar = _AnyToken()
    request.stopping = StoppingParams(1, min_tokens=1, stop_token_ids=frozenset([0]))
    _run(runner, plan)


def _run(runner: Runner, plan: Plan) -> None:
    runner.submit(plan).result()
    runner.submit(Plan(removed_ids=[entry.request.request_id for entry in plan.entries])).result()


class _AnyToken:
    """Implements `GrammarState`."""

    error = ""

    def advance(self, token_id: int) -> bool:
        return True

    def fill(self, row: NDArray[np.int32], *, may_end: bool) -> None:
        row[:] = -1


def used_beside_pool(free_bytes: int, total_bytes: int, pool_bytes: int) -> int:
    """Return what is in use of a device's memory beside a pool of that size."""
    return total_bytes - free_bytes - pool_bytes


def release_unused() -> None:
    """Give memory of what is no longer referred to back to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def make_or_shrink(pool: PoolSize, block_size: int, make: Callable[[PoolSize], _T]) -> tuple[_T, PoolSize]:
    """Return what `make` makes around a pool. Where memory does not suffice, it is tried once more with less.

    The longest request is cut to the smaller pool. Raises what `make` raises the second time.
    """
    try:
        return make(pool), pool
    except torch.OutOfMemoryError as error:
        smaller = shrunk(pool, block_size)
        logger.warning(
            "out of memory with %d KV blocks: trying %d, with requests of up to %d tokens: %s",
            pool.num_blocks,
            smaller.num_blocks,
            smaller.max_model_len,
            error,
        )
    # Outside the handler: the error's frames hold what was made so far.
    release_unused()
    return make(smaller), smaller


def shrunk(pool: PoolSize, block_size: int) -> PoolSize:
    num_blocks = max(1, int(pool.num_blocks * _SHRUNK_SHARE))
    return replace(pool, num_blocks=num_blocks, max_model_len=min(pool.max_model_len, num_blocks * block_size))
