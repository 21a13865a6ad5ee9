"""The benchmark of accuracy in fewer bits compares every variant with the model as it is loaded."""

from __future__ import annotations

import math
from pathlib import Path

import accuracy
import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional

from kvern.engine.config import EngineConfig
from kvern.engine.model.loader import load_model
from tests.engine.tiny_llama import PROMPT, expected_logits, save_tiny


def test_predictions_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of which the last has one token more to predict, or none."""
    monkeypatch.setattr(accuracy, "CHUNK", 40)
    model = save_tiny(tmp_path)
    token_ids = [*PROMPT, *PROMPT]
    loaded = load_model(EngineConfig(tmp_path, device="cpu", dtype="float32"))
    for count in (33, 80, 81, 140):
        predicted = accuracy.predict(loaded, torch.tensor(token_ids[:count]))
        logits = expected_logits(model, token_ids[:count])[:-1]
        expected = -functional.cross_entropy(logits.double(), torch.tensor(token_ids[1:count]), reduction="none")
        torch.testing.assert_close(predicted.logprobs, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(predicted.greedy, logits.argmax(1))


def test_every_variant_is_measured_beside_the_first(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    results = list(accuracy.measure(tmp_path, [*PROMPT, *PROMPT], window=32, dtype="float32"))
    assert [each.rounded for each in results] == [*accuracy.VARIANTS, *accuracy.CPU_VARIANTS]
    assert {each.num_tokens for each in results} == {4 * 31}
    assert (results[0].change, results[0].same_greedy) == (0, 1)
    for each in results[1:]:
        assert 0 < abs(each.change) < 0.5
        assert math.isclose(each.perplexity, results[0].perplexity * (1 + each.change))
        assert 0.5 < each.same_greedy <= 1


def test_text_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Too short.")
    printed = CliRunner().invoke(accuracy.main, ["--text", str(tmp_path / "text"), "--json"])
    assert printed.exit_code == 2
    assert "do not fill a window of 1024" in printed.output
