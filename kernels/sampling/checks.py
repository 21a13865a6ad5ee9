"""Sampling kernels against their definition: the same tokens, to the last one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvern.kernels.check import Check, assert_same, name_of, on_device, poisoned_outputs
from kvern.kernels.sampling import (
    DrawParams,
    LogitBias,
    Penalties,
    TokenMask,
    count_tokens,
    draw,
    edit_logits,
    reference,
)

FILTERS: dict[str, dict[str, float]] = {
    "none": {},
    "greedy": {"temperature": 0.0},
    "min_p": {"min_p": 0.02},
    "top_k 1": {"top_k": 1},
    "top_k 50": {"top_k": 50},
    "top_k 100,000": {"top_k": 100_000},
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.3": {"top_p": 0.3},
    "top_p 1e-6": {"top_p": 1e-6},
    "top_k 120, top_p 0.8": {"top_k": 120, "top_p": 0.8},
    "top_k 120, top_p 0.9999": {"top_k": 120, "top_p": 0.9999},
    "all": {"temperature": 1.7, "min_p": 0.001, "top_k": 500, "top_p": 0.95},
    "cold": {"temperature": 1e-5, "top_p": 0.5},
    "hot": {"temperature": 100.0, "top_p": 0.99},
}


@dataclass(frozen=True, slots=True)
class Edits:
    """One of each kind for some of 5 rows, one of which fills up the batch."""

    logits: Tensor
    slots: Tensor
    mask: TokenMask
    bias: LogitBias
    penalties: Penalties


def checks() -> Iterator[Check]:
    for vocab_size in (123, 5003):
        yield Check(f"draws of all kinds, {vocab_size} tokens", partial(_check_draws, vocab_size))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield Check(f"edits, {vocab_size} tokens, {name_of(dtype)}", partial(_check_edits, vocab_size, dtype))
    yield Check("draws from a large vocabulary", _check_large_vocabulary)
    yield Check("rows alone and in company", _check_company)
    yield Check("counts", _check_counts)


def make_logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Logits with many equal ones, as bfloat16 products give, and some tokens out."""
    generator = torch.Generator().manual_seed(seed * 1000 + vocab_size)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(torch.bfloat16).float()
    is_out = torch.rand(logits.shape, generator=generator) < 0.1
    is_out[:, vocab_size // 2] = False
    return logits.masked_fill(is_out, float("-inf"))


def make_params(filters: list[dict[str, float]], seed: int = 0) -> DrawParams:
    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([row.get(name, default) for row in filters], dtype=dtype)

    min_p = [row.get("min_p", 0.0) for row in filters]
    return DrawParams(
        temperature=column("temperature", 1.0, torch.float32),
        log_min_p=torch.tensor([math.log(each) if each else -math.inf for each in min_p]),
        top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0, torch.float64),
        seed=torch.tensor([(7**number * 1_000_003 + seed) % 2**63 - 2**62 for number in range(len(filters))]),
    )


def make_edits(vocab_size: int, dtype: torch.dtype) -> Edits:
    generator = torch.Generator().manual_seed(vocab_size)

    def chosen(share: float, num_rows: int) -> Tensor:
        return torch.rand(num_rows, vocab_size, generator=generator) < share

    bits = torch.randint(-(2**31), 2**31, (2, -(-vocab_size // 32)), generator=generator)
    addends = torch.randn(2, vocab_size, generator=generator).masked_fill(chosen(0.1, 2), float("-inf"))
    counts = torch.randint(0, 4, (3, vocab_size), generator=generator).mul(chosen(0.3, 3)).to(torch.int32)
    params = torch.tensor([[1.3, 0.0, 0.0], [1.0, 0.7, -0.4], [0.9, 0.1, 0.3]])
    return Edits(
        logits=make_logits(5, vocab_size).to(dtype),
        slots=torch.tensor([2, 0, -1, 1, 3]),
        mask=TokenMask(torch.tensor([1, -1, 0, -1, 0]), bits.to(torch.int32)),
        bias=LogitBias(torch.tensor([-1, 0, 0, 1, -1]), addends),
        penalties=Penalties(torch.tensor([2, -1, 0, 1, 0]), params, chosen(0.3, 3), counts),
    )


def drawn(*arguments: Any) -> list[int]:
    """Draw with outputs poisoned. Every row must have had something to choose from."""
    with poisoned_outputs():
        token_ids, is_allowed = draw(*arguments)
    assert is_allowed.all()
    tokens: list[int] = token_ids.tolist()
    return tokens


def _check_draws(vocab_size: int, device: torch.device) -> None:
    """Rows of all kinds in one batch, slots in another order than rows."""
    slots = torch.randperm(len(FILTERS), generator=torch.Generator().manual_seed(1))
    logits, positions = make_logits(len(FILTERS), vocab_size), 3 * torch.arange(len(FILTERS))
    _compare_draws((logits, slots, positions, make_params(list(FILTERS.values()))), device)


def _check_large_vocabulary(device: torch.device) -> None:
    """Many tiles, more than are a power of two; near-equal logits, so that hundreds of thousands are candidates."""
    params = make_params([{"top_k": 64, "top_p": 0.9}, {"top_p": 0.7}, {}])
    _compare_draws((make_logits(3, 49_157) * 0.01, torch.arange(3), torch.tensor([5, 6, 7]), params), device)


def _compare_draws(arguments: tuple[Any, ...], device: torch.device) -> None:
    actual, expected = drawn(*on_device(arguments, device)), reference.draw(*arguments)
    assert actual == expected, f"tokens {actual} are not {expected}"


def _check_company(device: torch.device) -> None:
    params, slots, positions = make_params(list(FILTERS.values())), torch.tensor([4, 6, 11, 0]), torch.arange(4)
    arguments = (make_logits(4, 1001, seed=2), slots, positions, params)
    logits, slots, positions, params = on_device(arguments, device)
    together = drawn(logits, slots, positions, params)
    for row in range(4):
        one = slice(row, row + 1)
        assert drawn(logits[one], slots[one], positions[one], params) == together[one]


def _check_edits(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    edits = make_edits(vocab_size, dtype)
    edits.logits[1, 7] = 3e38 if dtype is not torch.float16 else 6e4
    expected, is_finite = reference.edit_logits(edits.logits, edits.slots, edits.mask, edits.bias, edits.penalties)
    there = on_device(edits, device)
    with poisoned_outputs():
        actual = edit_logits(there.logits.clone(), there.slots, there.mask, there.bias, there.penalties)
    in_use = edits.slots >= 0
    assert_same(actual.logits.cpu()[in_use] + 0.0, expected[in_use] + 0.0)
    assert actual.is_finite.tolist() == is_finite


def _check_counts(device: torch.device) -> None:
    penalties = make_edits(123, torch.float32).penalties
    expected = penalties.output_counts.clone()
    for row, token in ((2, 7), (0, 9), (1, 122)):
        expected[row, token] += 1
    index = torch.tensor([2, -1, 0, 1, -1])
    there = on_device(Penalties(index, penalties.params, penalties.in_prompt, penalties.output_counts.clone()), device)
    count_tokens(there, torch.tensor([7, 8, 9, 122, 0], device=device))
    assert_same(there.output_counts, expected)
