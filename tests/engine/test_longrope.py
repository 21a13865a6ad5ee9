"""LongRoPE's two lists of factors: the choice between them, beside transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern.engine.config import EngineConfig
from kvern.engine.startup import start_engine

from .engine_harness import EngineHarness
from .tiny_llama import load
from .tiny_models import PROMPT, expected_logits, expected_tokens, paged_logits, save_tiny

ORIGINAL_LENGTH = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [2.0, 3.0, 4.0],
}
PHI3: dict[str, Any] = {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL_LENGTH}


def test_prompt_beyond_the_original_length_equals_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Served as trained, or with a limit above the original length: the long factors, from the first token on."""
    model = save_tiny(tmp_path, "Phi3", **PHI3)
    expected = expected_logits(model)
    for max_model_len in (None, ORIGINAL_LENGTH + 1):
        with caplog.at_level(logging.WARNING):
            loaded = load(tmp_path, max_model_len=max_model_len)
        assert f"a max_model_len of at most {ORIGINAL_LENGTH} would use those for short ones" in caplog.text
        assert loaded.config.max_position_embeddings == 256
        for chunk in (len(PROMPT), 7):
            torch.testing.assert_close(paged_logits(loaded, chunk), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("max_model_len", "prompt"), [(64, PROMPT), (ORIGINAL_LENGTH, PROMPT[:6])])
def test_tokens_of_an_engine_equal_transformers_on_its_side_of_the_original_length(
    tmp_path: Path, max_model_len: int, prompt: list[int]
) -> None:
    model = save_tiny(tmp_path, "Phi3", **PHI3)
    engine = EngineHarness(
        start_engine(EngineConfig(tmp_path, device="cpu", max_model_len=max_model_len, num_blocks=8))
    )
    assert engine.generate(prompt, 10).token_ids == expected_tokens(model, 10, prompt)


def test_model_served_up_to_the_original_length_equals_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_tiny(tmp_path, "Phi3", **PHI3)
    prompt = PROMPT[:ORIGINAL_LENGTH]
    with caplog.at_level(logging.WARNING):
        short, long = load(tmp_path, max_model_len=ORIGINAL_LENGTH), load(tmp_path)
    assert caplog.text.count("LongRoPE's factors for long contexts are used") == 1
    torch.testing.assert_close(paged_logits(short, 7, prompt), expected_logits(model, prompt), atol=1e-4, rtol=1e-4)
    assert short.fingerprint != long.fingerprint
    assert short.fingerprint == load(tmp_path, max_model_len=ORIGINAL_LENGTH - 1).fingerprint


def test_factors_of_a_short_prompt_follow_the_served_length_alone(tmp_path: Path) -> None:
    """Where transformers switches to the long factors in mid-sequence, a prefix's KV stays what it was."""
    save_tiny(tmp_path / "model", "Phi3", **PHI3)
    always_long = LONGROPE | {"short_factor": LONGROPE["long_factor"]}
    model = save_tiny(tmp_path / "always long", "Phi3", **(PHI3 | {"rope_parameters": always_long}))
    loaded, prompt = load(tmp_path / "model"), PROMPT[:ORIGINAL_LENGTH]
    torch.testing.assert_close(paged_logits(loaded, 7, prompt), expected_logits(model, prompt), atol=1e-4, rtol=1e-4)
