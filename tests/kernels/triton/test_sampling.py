"""Sampling kernels against their definition, and against the engine's sampler: the same tokens, to the last one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvern.engine.sampler import RandomRows, sample
from kvern.kernels.check import Check, poisoned_outputs
from kvern.kernels.sampling import DrawParams, LogitBias, TokenMask, draw, edit_logits
from kvern.kernels.sampling.checks import FILTERS, checks, drawn, make_logits, make_params


def sampled_by_the_engine(logits: Tensor, slots: Tensor, positions: Tensor, params: DrawParams) -> Tensor:
    rows = (params.temperature[slots] >= 1e-5).nonzero().flatten()
    chosen = slots[rows]
    random = RandomRows(
        rows=rows,
        temperature=params.temperature[chosen],
        log_min_p=params.log_min_p[chosen],
        top_k=params.top_k[chosen],
        top_p=params.top_p[chosen],
        seed=params.seed[chosen],
        output_position=positions[rows],
        has_min_p=True,
        has_top_k=True,
        has_top_p=True,
    )
    return sample(logits.clone(), random).token_ids


@pytest.mark.parametrize("check", list(checks()), ids=lambda check: check.name)
def test_sampling_equals_reference(check: Check) -> None:
    check.run(torch.device("cpu"))


@pytest.mark.parametrize("name", [name for name in FILTERS if name != "greedy"])
def test_draws_at_many_positions_equal_the_engine(name: str) -> None:
    params, slots = make_params([FILTERS[name]]), torch.zeros(3, dtype=torch.int64)
    logits, positions = make_logits(1, 1001, seed=5).expand(3, -1).contiguous(), torch.arange(3)
    assert (
        drawn(logits.clone(), slots, positions, params)
        == sampled_by_the_engine(logits, slots, positions, params).tolist()
    )


def test_only_token_of_a_vocabulary_is_drawn() -> None:
    slots = torch.arange(2)
    assert drawn(torch.zeros(2, 1), slots, slots, make_params([{"top_k": 1, "top_p": 0.9}, {}])) == [0, 0]


@pytest.mark.parametrize("top_p", [1.0, 0.5, 0.51])
def test_of_equal_logits_the_lowest_ids_are_kept(top_p: float) -> None:
    """At the edge of top_k and of top_p, over a border of tiles; -0.0 and 0.0 are equal."""
    logits = torch.full((8, 5003), float("-inf"))
    logits[:, [5, 4095, 4096, 5000]] = torch.tensor([0.0, -0.0, 0.0, 0.0])
    slots, positions = torch.zeros(8, dtype=torch.int64), torch.arange(8)
    expected = {1.0: {5, 4095, 4096, 5000}, 0.5: {5, 4095}, 0.51: {5, 4095, 4096}}[top_p]
    assert set(drawn(logits.clone(), slots, positions, make_params([{"top_p": top_p}]))) == expected
    cut = make_params([{"top_k": len(expected), "top_p": 1.0}])
    assert set(drawn(logits.clone(), slots, positions, cut)) == expected
    assert drawn(logits[:1].clone(), slots[:1], positions[:1], make_params([{"temperature": 0.0}])) == [5]


def test_rows_that_fill_up_a_batch_are_not_looked_at() -> None:
    logits, slots = make_logits(3, 123), torch.tensor([-1, 0, -1])
    logits[0], logits[2] = float("nan"), float("-inf")
    with poisoned_outputs():
        edited = edit_logits(logits, slots)
    assert edited.is_finite.tolist() == [True, True, True]
    assert logits[0].isnan().all()
    actual = drawn(logits, slots, torch.arange(3), make_params([{"top_p": 0.9}]))
    assert actual == [0, *drawn(logits[1:2], slots[1:2], torch.tensor([1]), make_params([{"top_p": 0.9}])), 0]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), None])
@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {"top_k": 20, "top_p": 0.9}])
def test_logits_that_are_no_numbers_fail_their_row_alone(filters: dict[str, float], poison: float | None) -> None:
    """D18: an error, not a token. None: all of the row is -inf."""
    logits, slots, positions = make_logits(3, 5003), torch.zeros(3, dtype=torch.int64), torch.arange(3)
    params = make_params([filters])
    expected = drawn(logits.clone(), slots, positions, params)
    if poison is None:
        logits[1] = float("-inf")
    else:
        logits[1, 4500] = poison
    edited = edit_logits(logits, slots)
    assert edited.is_finite.tolist() == [True, False, True]
    token_ids, _ = draw(edited.logits, slots, positions, params)
    assert token_ids[[0, 2]].tolist() == [expected[0], expected[2]]
    assert 0 <= token_ids[1] < 5003


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_row_that_nothing_is_left_of_is_told() -> None:
    logits, slots = make_logits(2, 123), torch.zeros(2, dtype=torch.int64)
    mask = TokenMask(torch.tensor([-1, 0]), torch.zeros(1, 4, dtype=torch.int32))
    edited = edit_logits(logits, slots, mask)
    _, is_allowed = draw(edited.logits, slots, torch.arange(2), make_params([{"top_p": 0.9}]))
    assert edited.is_finite.tolist() == [True, True]
    assert is_allowed.tolist() == [True, False]


def test_what_does_not_fit_raises_value_error() -> None:
    logits, params = make_logits(2, 123), make_params([{}])
    with pytest.raises(ValueError, match=r"slots: \[3\]"):
        draw(logits, torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), params)
    with pytest.raises(ValueError, match=r"logits are \[2, 123\] of torch.bfloat16"):
        draw(logits.bfloat16(), *(torch.zeros(2, dtype=torch.int64),) * 2, params)
    index = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"bias addends: \[1, 122\]"):
        edit_logits(logits, index, bias=LogitBias(index, torch.zeros(1, 122)))
