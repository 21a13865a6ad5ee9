"""What is learnt of a step's cost, from steps as an engine has them."""

from __future__ import annotations

import random

import pytest

from kvern.engine.step_cost import StepCost


def seconds(num_decodes: int, num_prefill_tokens: int, context: float = 0) -> float:
    return 0.009 + 0.001 * num_decodes + num_prefill_tokens * (0.0006 + 2e-7 * context)


def learnt(*steps: tuple[int, int]) -> StepCost:
    cost = StepCost()
    for step in steps:
        cost.observe(*step, seconds(*step))
    return cost


def test_cost_of_steps_not_seen_follows_from_those_seen() -> None:
    cost = learnt((1, 0), (8, 0), (3, 0), (4, 100), (2, 700))
    for step in ((20, 0), (1, 2000), (64, 16)):
        assert cost.expected_s(*step) == pytest.approx(seconds(*step))
    assert cost.max_prefill_tokens(8, 0.1) == pytest.approx((0.1 - 0.017) / 0.0006, abs=1)
    assert cost.max_prefill_tokens(8, 0.01) == 0


def test_nothing_is_expected_of_a_kind_that_was_not_seen() -> None:
    assert StepCost().expected_s(1, 0) is None
    assert learnt((0, 30)).expected_s(1, 0) is None
    assert learnt((1, 0)).expected_s(0, 30) is None
    assert learnt((1, 0)).max_prefill_tokens(1, 1.0) is None


def test_what_a_prompt_costs_is_known_after_any_number_of_decodes() -> None:
    cost = learnt((1, 0), (8, 0), (0, 1000), *[(4, 0)] * 5000)
    assert cost.expected_s(4, 1000) == pytest.approx(seconds(4, 1000), rel=0.01)


@pytest.mark.parametrize("start_s", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_long_prompts_beside_decodes_get_the_target_whatever_the_first_step_took(seed: int, start_s: float) -> None:
    """A first step takes long for reasons of its own, others now and then; a token costs more in a longer context."""
    cost, rng, target_s = StepCost(), random.Random(seed), 0.4

    def run(num_decodes: int, num_prefill_tokens: int, context: float = 0, more_s: float = 0) -> float:
        slower = 1 + 0.05 * rng.random() + (rng.random() < 0.02)
        taken_s = more_s + slower * seconds(num_decodes, num_prefill_tokens, context)
        cost.observe(num_decodes, num_prefill_tokens, taken_s)
        return taken_s

    run(0, 32, 16, start_s)
    for _ in range(255):
        run(1, 0)
    run(0, 2048, 1024)
    run(0, 1952, 3072)
    for num_decodes in (*[1] * 7, *range(1, 8), *[8] * 70):
        run(num_decodes, 0)
    num_steps, taken_s = 0, 0.0
    for _ in range(3):
        context = 0
        while context < 4000:
            num_tokens = min(max(16, cost.max_prefill_tokens(8, target_s) or 128), 4000 - context)
            taken_s += run(8, num_tokens, context + num_tokens / 2)
            context, num_steps = context + num_tokens, num_steps + 1
    assert 0.5 * target_s < taken_s / num_steps < 1.25 * target_s
