"""In bfloat16, on a CPU that multiplies it, a request's tokens depend on nothing but the request, as in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvern.engine.config import EngineConfig
from kvern.engine.model.loader import LoadedModel, load_model
from kvern.engine.request import SamplingParams
from kvern.engine.startup import build_engine
from kvern.kernels.cpu import HAS_BF16

from .engine_harness import EngineHarness

pytestmark = pytest.mark.skipif(
    not HAS_BF16, reason="this CPU does not multiply bfloat16: oneDNN does, in other orders"
)

NUM_TOKENS = 12
SAMPLING = SamplingParams(temperature=1, seed=2**63 + 5)
"""Of the whole distribution: where a sum differed in its last bits, a draw could."""

Tokens = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> LoadedModel:
    return load_model(EngineConfig(smollm2_path, dtype="bfloat16", device="cpu"))


@pytest.fixture(scope="module")
def alone(model: LoadedModel, reference_tokens: Tokens) -> Tokens:
    """What each of five prompts gives whole, cold and alone."""
    engine = harness(model, enable_prefix_caching=False)
    prompts = [prompt for prompt in reference_tokens if 16 < len(prompt) <= 60][:5]
    return {prompt: engine.generate(prompt, NUM_TOKENS, SAMPLING).token_ids for prompt in prompts}


def harness(model: LoadedModel, **options: object) -> EngineHarness:
    settings = {"num_blocks": 256, "max_model_len": 256, "max_num_seqs": 64} | options
    return EngineHarness(build_engine(model, EngineConfig(model_path=Path("unread"), **settings)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 7, "enable_prefix_caching": False},
        {"num_blocks": 12, "max_model_len": 128, "max_num_seqs": 8},
    ],
    ids=["in chunks", "preempted"],
)
def test_seeded_tokens_in_bfloat16_are_those_alone(
    model: LoadedModel, alone: Tokens, options: dict[str, object]
) -> None:
    engine = harness(model, **options)
    outcomes = {prompt: engine.add(prompt, NUM_TOKENS, SAMPLING) for prompt in alone}
    engine.run()
    assert {prompt: outcome.token_ids for prompt, outcome in outcomes.items()} == alone


def test_seeded_tokens_in_bfloat16_among_others_and_from_the_cache_are_those_alone(
    model: LoadedModel, alone: Tokens
) -> None:
    engine = harness(model)
    for number in range(17):
        engine.add([1000 + number] * (3 + 2 * number), 4 + number, SamplingParams(1.0, 0.9, 50, seed=number))
    for num_cached in (0, 16):
        outcomes = {prompt: engine.add(prompt, NUM_TOKENS, SAMPLING) for prompt in alone}
        engine.run()
        assert {prompt: outcome.token_ids for prompt, outcome in outcomes.items()} == alone
        assert all((outcome.request.num_cached_tokens or 0) >= num_cached for outcome in outcomes.values())
