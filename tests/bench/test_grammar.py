"""The benchmark of constraints measures every schema and batch size."""

from __future__ import annotations

import json

import grammar
import pytest
from click.testing import CliRunner


def test_grammar_bench_prints_a_cost_for_each_schema_and_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "NUM_COMPILES", 2)
    monkeypatch.setattr(grammar, "BATCH_SIZES", (1, 2))
    printed = CliRunner().invoke(grammar.main, ["--json"], catch_exceptions=False)
    costs = json.loads(printed.output)
    assert [cost["name"] for cost in costs["schemas"]] == list(grammar.SCHEMAS)
    assert [cost["num_rows"] for cost in costs["batches"]] == [1, 2]
    assert all(cost["compile_ms"] > 0 and cost["step_ms"] > 0 for cost in costs["schemas"])
