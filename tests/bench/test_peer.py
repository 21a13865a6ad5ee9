"""The comparison takes medians, turns the order round, and says what misses its aim."""

from __future__ import annotations

from dataclasses import replace

import peer
import pytest
from serve import Measured

ROUND = Measured("c1", 100.0, 0.02, 0.03, 0.01, 0.015, None, 1.0, 30.0, 512)


def test_rounds_run_backwards_in_turn_and_medians_are_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def measure(url: str, name: str, seed: int) -> Measured:
        calls.append((url, name, seed))
        return replace(ROUND, workload=name, tok_s=float(len(calls)))

    monkeypatch.setattr(peer, "measure", measure)
    results = peer.compare({peer.OURS: "a", peer.PEER: "b", peer.LLAMA: "c"}, ["c1", "c16"], rounds=3)
    assert [url + name for url, name, _ in calls] == [
        "ac1", "bc1", "cc1", "cc1", "bc1", "ac1", "ac1", "bc1", "cc1",
        "ac16", "bc16", "bc16", "ac16", "ac16", "bc16",
    ]  # fmt: skip
    assert [seed - calls[0][2] for _, _, seed in calls] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 1, 1, 2, 2]
    assert peer.medians(results["c1"][peer.OURS])["tok_s"] == 6.0
    assert peer.medians(results["c1"][peer.OURS])["long_ttft_p50"] is None


def test_table_says_which_figure_misses_its_aim(capsys: pytest.CaptureFixture[str]) -> None:
    slow = replace(ROUND, tok_s=60.0)
    peer.print_table({workload: {peer.OURS: [ROUND], peer.PEER: [slow]} for workload in ("c1", "c16")})
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "tok_s" in line]
    assert rows == [
        ["c1", "tok_s", "100.0", "60.0", "1.67", ">=", "1.4"],
        ["c16", "tok_s", "100.0", "60.0", "1.67", ">=", "1.8", "MISSED"],
    ]


def test_weights_in_4_bits_are_beside_those_of_llama_cpp(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = {name: [replace(ROUND, tok_s=tok_s)] for name, tok_s in ((peer.OURS_IN_4_BITS, 90.0), (peer.LLAMA, 100.0))}
    peer.print_table({"c1": {peer.OURS: [ROUND], peer.PEER: [ROUND]} | rounds})
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "tok_s" in line]
    assert rows[1] == ["c1", "tok_s", "90.0", "100.0", "0.90", ">=", "1", "MISSED"]
