"""The whole engine on real weights in fp32: the same tokens as transformers, however the work is cut and shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvern.engine.config import EngineConfig
from kvern.engine.model.loader import LoadedModel, load_model
from kvern.engine.request import SamplingParams
from kvern.engine.startup import build_engine
from kvern.services.engine.convert import choice_seed

from .engine_harness import EngineHarness, Outcome

# Minutes of pure computing where other work has the cores.
pytestmark = pytest.mark.timeout(1200)

Reference = dict[tuple[int, ...], list[int]]

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> LoadedModel:
    return load_model(EngineConfig(smollm2_path, dtype="float32"))


def harness(model: LoadedModel, **options: object) -> EngineHarness:
    settings = {"num_blocks": 2048, "max_model_len": 2048} | options
    return EngineHarness(build_engine(model, EngineConfig(model_path=Path("unread"), **settings)))  # type: ignore[arg-type]


def tokens_of(outcomes: dict[tuple[int, ...], Outcome]) -> Reference:
    return {prompt: outcome.token_ids for prompt, outcome in outcomes.items()}


def first_tokens(reference: Reference, count: int) -> Reference:
    return {prompt: tokens[:count] for prompt, tokens in reference.items()}


def test_greedy_tokens_whole_prompts_alone_equal_transformers(model: LoadedModel, reference_tokens: Reference) -> None:
    """I01. A fifth of the prompts and half the tokens, since alone they take longest; in company all, below."""
    engine = harness(model, enable_prefix_caching=False)
    for prompt, expected in list(first_tokens(reference_tokens, NUM_TOKENS // 2).items())[::5]:
        assert engine.generate(prompt, NUM_TOKENS // 2).token_ids == expected


def test_greedy_tokens_in_chunks_of_seven_equal_transformers(model: LoadedModel, reference_tokens: Reference) -> None:
    """It is the prompts that are cut, so that a few tokens after each tell."""
    expected = first_tokens(reference_tokens, 24)
    engine = harness(model, max_num_batched_tokens=7, max_num_seqs=7, enable_prefix_caching=False)
    outcomes = {prompt: engine.add(prompt, 24) for prompt in expected}
    engine.run()
    assert engine.num_steps > sum(len(prompt) for prompt in expected) / 7
    assert tokens_of(outcomes) == expected


def test_greedy_tokens_from_the_prefix_cache_equal_transformers(
    model: LoadedModel, reference_tokens: Reference
) -> None:
    """C16, C18: warm from a shorter and from a longer prompt's blocks."""
    engine = harness(model)
    for prompt in reference_tokens:
        engine.add(prompt, 1)
        engine.add([*prompt, 5, 6, 7], 1)
    engine.run()
    outcomes = {prompt: engine.add(prompt, NUM_TOKENS) for prompt in reference_tokens}
    engine.run()
    for prompt, outcome in outcomes.items():
        assert outcome.request.num_cached_tokens == min(len(prompt) // 16 * 16, len(prompt) - 1)
        assert outcome.token_ids == reference_tokens[prompt]


def add_others(engine: EngineHarness, count: int) -> list[Outcome]:
    """Add requests of all lengths that sample at random, come and go."""
    return [
        engine.add([1000 + number] * (3 + number), 8 + number // 2, SamplingParams(1.0, 0.9, 50, seed=number))
        for number in range(count)
    ]


def test_greedy_tokens_of_preempted_requests_equal_transformers(
    model: LoadedModel, reference_tokens: Reference
) -> None:
    short = {prompt: tokens for prompt, tokens in reference_tokens.items() if len(prompt) <= 60}
    expected = first_tokens(short, NUM_TOKENS // 2)
    engine = harness(model, num_blocks=16, max_model_len=256, max_num_seqs=8)
    outcomes = {prompt: engine.add(prompt, NUM_TOKENS // 2) for prompt in expected}
    engine.run()
    assert sum(outcome.request.num_preemptions for outcome in outcomes.values()) > 0
    assert tokens_of(outcomes) == expected


SEEDED = SamplingParams(temperature=1, seed=2**63 + 5)
"""Of the whole distribution, nothing filtered: where a sum differed in its last bits, a draw could."""

NUM_SEEDED_TOKENS = 24


@pytest.fixture(scope="module")
def seeded_tokens(model: LoadedModel, reference_tokens: Reference) -> Reference:
    """What each of six prompts gives whole, cold and alone."""
    engine = harness(model, enable_prefix_caching=False)
    prompts = [prompt for prompt in reference_tokens if len(prompt) <= 60][:6]
    return {prompt: engine.generate(prompt, NUM_SEEDED_TOKENS, SEEDED).token_ids for prompt in prompts}


def run_seeded(engine: EngineHarness, seeded_tokens: Reference) -> dict[tuple[int, ...], Outcome]:
    outcomes = {prompt: engine.add(prompt, NUM_SEEDED_TOKENS, SEEDED) for prompt in seeded_tokens}
    engine.run()
    return outcomes


def test_seeded_tokens_from_the_prefix_cache_are_the_same(model: LoadedModel, seeded_tokens: Reference) -> None:
    engine = harness(model)
    run_seeded(engine, seeded_tokens)
    warm = run_seeded(engine, seeded_tokens)
    assert all(outcome.request.num_cached_tokens for prompt, outcome in warm.items() if len(prompt) >= 16)
    assert tokens_of(warm) == seeded_tokens


def test_seeded_tokens_in_chunks_of_seven_are_the_same(model: LoadedModel, seeded_tokens: Reference) -> None:
    engine = harness(model, max_num_batched_tokens=7, max_num_seqs=7, enable_prefix_caching=False)
    assert tokens_of(run_seeded(engine, seeded_tokens)) == seeded_tokens


def test_greedy_and_seeded_tokens_among_63_others_are_the_same(
    model: LoadedModel, reference_tokens: Reference, seeded_tokens: Reference
) -> None:
    """I01, D17, D02."""
    assert len(reference_tokens) >= 20
    engine = harness(model, max_num_seqs=128, max_num_batched_tokens=256)
    others = add_others(engine, 63)
    greedy = {prompt: engine.add(prompt, NUM_TOKENS) for prompt in reference_tokens}
    assert tokens_of(run_seeded(engine, seeded_tokens)) == seeded_tokens
    assert tokens_of(greedy) == reference_tokens
    assert all(len(other.token_ids) == 8 + number // 2 for number, other in enumerate(others))


def test_seeded_tokens_of_preempted_requests_are_the_same(model: LoadedModel, seeded_tokens: Reference) -> None:
    engine = harness(model, num_blocks=12, max_model_len=128, max_num_seqs=8)
    outcomes = run_seeded(engine, seeded_tokens)
    assert sum(outcome.request.num_preemptions for outcome in outcomes.values()) > 0
    assert tokens_of(outcomes) == seeded_tokens


def test_four_choices_are_what_four_requests_with_their_seeds_give(
    model: LoadedModel, seeded_tokens: Reference
) -> None:
    """D04, A25."""
    prompt = max(seeded_tokens, key=len)
    samplings = [replace(SEEDED, seed=choice_seed(SEEDED.seed, choice)) for choice in range(4)]
    single = harness(model, enable_prefix_caching=False)
    further = [single.generate(prompt, NUM_SEEDED_TOKENS, sampling).token_ids for sampling in samplings[1:]]
    expected = [seeded_tokens[prompt], *further]
    engine = harness(model)
    first = engine.add(prompt, NUM_SEEDED_TOKENS, samplings[0])
    forks = [
        engine.add(prompt, NUM_SEEDED_TOKENS, sampling, choice=choice, arrival=0, fork_of=first.request)
        for choice, sampling in enumerate(samplings[1:], start=1)
    ]
    engine.run()
    assert [outcome.token_ids for outcome in [first, *forks]] == expected
    assert len(set(map(tuple, expected))) == 4
    assert all(len(tokens) == NUM_SEEDED_TOKENS for tokens in expected)
