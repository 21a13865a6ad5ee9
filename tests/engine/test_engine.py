"""The whole engine on real weights in fp32: the same tokens as transformers, however the work is cut and shared."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvern.engine.config import EngineConfig
from kvern.engine.model import LoadedModel, load_model
from kvern.engine.request import SamplingParams
from kvern.engine.startup import build_engine

from .engine_harness import EngineHarness

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


def test_greedy_tokens_whole_prompts_alone_equal_transformers(model: LoadedModel, reference_tokens: Reference) -> None:
    """I01."""
    assert len(reference_tokens) >= 20
    engine = harness(model, enable_prefix_caching=False)
    for prompt, expected in reference_tokens.items():
        assert engine.generate(prompt, NUM_TOKENS).token_ids == expected


def test_greedy_tokens_in_chunks_of_seven_equal_transformers(model: LoadedModel, reference_tokens: Reference) -> None:
    engine = harness(model, max_num_batched_tokens=7, max_num_seqs=7, enable_prefix_caching=False)
    outcomes = {prompt: engine.add(prompt, NUM_TOKENS) for prompt in reference_tokens}
    engine.run()
    assert engine.num_steps > sum(len(prompt) for prompt in reference_tokens) / 7
    assert {prompt: outcome.token_ids for prompt, outcome in outcomes.items()} == reference_tokens


def test_greedy_tokens_from_the_prefix_cache_equal_transformers(
    model: LoadedModel, reference_tokens: Reference
) -> None:
    """C16, C18: cold, then warm from a shorter and from a longer prompt's blocks."""
    engine = harness(model)
    for prompt in reference_tokens:
        engine.add(prompt, NUM_TOKENS)
        engine.add([*prompt, 5, 6, 7], 1)
    engine.run()
    outcomes = {prompt: engine.add(prompt, NUM_TOKENS) for prompt in reference_tokens}
    engine.run()
    for prompt, outcome in outcomes.items():
        assert outcome.request.num_cached_tokens == min(len(prompt) // 16 * 16, len(prompt) - 1)
        assert outcome.token_ids == reference_tokens[prompt]


def test_greedy_tokens_among_32_others_equal_transformers(model: LoadedModel, reference_tokens: Reference) -> None:
    """D17, D02: others sample at random, come and go, and do not move a greedy request."""
    engine = harness(model, max_num_seqs=64, max_num_batched_tokens=256)
    others = [
        engine.add([1000 + number] * (3 + 5 * number), 8 + 2 * number, SamplingParams(1.0, 0.9, 50, seed=number))
        for number in range(32)
    ]
    outcomes = {prompt: engine.add(prompt, NUM_TOKENS) for prompt in reference_tokens}
    engine.run()
    assert all(len(other.token_ids) == 8 + 2 * number for number, other in enumerate(others))
    assert {prompt: outcome.token_ids for prompt, outcome in outcomes.items()} == reference_tokens


def test_greedy_tokens_of_preempted_requests_equal_transformers(
    model: LoadedModel, reference_tokens: Reference
) -> None:
    short = {prompt: tokens for prompt, tokens in reference_tokens.items() if len(prompt) <= 60}
    engine = harness(model, num_blocks=32, max_model_len=256, max_num_seqs=8)
    outcomes = {prompt: engine.add(prompt, NUM_TOKENS) for prompt in short}
    engine.run()
    assert sum(outcome.request.num_preemptions for outcome in outcomes.values()) > 0
    assert {prompt: outcome.token_ids for prompt, outcome in outcomes.items()} == short


def test_seeded_tokens_do_not_depend_on_chunks_cache_or_company(
    model: LoadedModel, reference_tokens: Reference
) -> None:
    """A request's draws depend on its seed and its positions alone."""
    sampling = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=2**63 + 5)
    prompts = list(reference_tokens)[:6]
    alone = harness(model)
    expected = [alone.generate(prompt, 24, sampling).token_ids for prompt in prompts]
    assert [alone.generate(prompt, 24, sampling).token_ids for prompt in prompts] == expected
    crowd = harness(model, max_num_batched_tokens=7, max_num_seqs=7)
    outcomes = [crowd.add(prompt, 24, sampling) for prompt in prompts]
    crowd.run()
    assert [outcome.token_ids for outcome in outcomes] == expected
