"""The benchmark of streams brings every token to its clients, and says what that cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import stream
from linear_decode import linear_ratio

from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import Tokenizer, load_tokenizer

NUM_STREAMS = 6
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(find_model("smollm2", weights=False))


@pytest.fixture(scope="module")
def bench(tokenizer: Tokenizer) -> Iterator[stream.Bench]:
    with stream.set_up(tokenizer) as bench:
        yield bench


def test_flows_bring_every_token_and_name_what_was_busiest(bench: stream.Bench, tokenizer: Tokenizer) -> None:
    """That none is lost or comes twice, the clients check themselves."""
    flows = [bench.run(bench.workload(door, NUM_STREAMS, NUM_TOKENS)) for door in ("engine", "detokenizer", "router")]
    # At a pace that lasts longer than a process of a busy machine stands still: else all might come in one message.
    flows.append(bench.run(bench.workload("router", NUM_STREAMS, NUM_TOKENS, steps_per_s=25)))
    for flow in flows:
        assert flow.tokens_per_s > 0
        assert flow.limit in flow.cpu_share
    assert flows[0].tokens_per_message == NUM_STREAMS
    assert flows[2].added_ms == (0.0, 0.0)
    assert 0 < flows[3].added_ms[0] <= flows[3].added_ms[1]
    assert 0 < flows[3].gap_ms[0] <= flows[3].gap_ms[1]
    results = stream.to_json(flows, linear_ratio(tokenizer))
    assert results["router_tok_s"] == flows[2].tokens_per_s
    assert results["added_ms_p99"] == flows[3].added_ms[1]
    assert results["linear_ratio"] > 0


def test_slow_reader_is_measured_beside_those_that_keep_up(
    bench: stream.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "NUM_QUICK_STREAMS", 3)
    monkeypatch.setattr(stream, "SLOW_INTERVAL_S", 0.5)
    monkeypatch.setattr(stream, "SLOW_OVERTIME_S", 0)
    # Longer than a process of a busy machine stands still: in one message there are no gaps to compare.
    measured = stream.run_slow_reader(bench, steps_per_s=25, duration_s=2)
    assert measured.num_quick_streams == 3
    assert measured.p99_gap_ratio == measured.beside_p99_gap_ms / measured.quick_p99_gap_ms
    assert measured.rss_growth_mib.keys() == {"detokenizer", "router"}
