"""The table of attention on a CPU."""

from __future__ import annotations

import json

import pytest

from kvern.kernels.paged_attention import cpu_bench


def test_attention_of_small_shapes_is_measured_both_ways(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_bench, "SHAPES", [(2, 40, 1), (1, 40, 9)])
    assert cpu_bench.main(["--json"]) == 0
    decode, prefill = json.loads(capsys.readouterr().out)
    assert decode["compiled_ms"] > 0
    assert decode["gathered_ms"] > 0
    kv_bytes = 2 * 40 * 2 * 3 * 64 * 2 * 30
    assert decode["gb_per_s"] * decode["compiled_ms"] == pytest.approx(kv_bytes / 1e6)
    seen = sum(range(32, 41))
    assert prefill["gflops"] * prefill["compiled_ms"] == pytest.approx(4 * seen * 9 * 64 * 30 / 1e6)
    assert cpu_bench.main([]) == 0
    assert "2 x      40" in capsys.readouterr().out
