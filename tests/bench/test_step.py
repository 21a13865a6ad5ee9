"""The benchmark of a step, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import step
from click.testing import CliRunner

from tests.engine.tiny_llama import save_tiny


def test_step_is_split_among_phases_and_the_models_parts(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    arguments = [str(tmp_path), "--batch", "3", "--context", "24", "--steps", "4", "--profile", "--json"]
    printed = CliRunner().invoke(step.main, arguments, catch_exceptions=False)
    cost = json.loads(printed.stdout)
    assert tuple(cost["fractions"]) == ("commands", "schedule", "prepare", "forward", "sample", "commit", "emit")
    assert sum(cost["fractions"].values()) == pytest.approx(1)
    assert cost["overhead"] == pytest.approx(1 - cost["fractions"]["forward"] - cost["fractions"]["sample"])
    assert set(cost["parts_ms"]) == {"norms", "linear layers", "rotary and KV", "attention", "activation", "head"}
    assert 0 < sum(cost["parts_ms"].values()) < cost["step_ms"] * 3
