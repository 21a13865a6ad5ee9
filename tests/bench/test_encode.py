"""The benchmark of the tokenizer's cache measures every turn, and finds the cache used."""

from __future__ import annotations

import json

import encode
from click.testing import CliRunner


def test_encode_bench_prints_each_turn_and_the_ratio() -> None:
    arguments = ["--turns", "8", "--chars", "40000", "--json"]
    printed = json.loads(CliRunner().invoke(encode.main, arguments, catch_exceptions=False).output)
    assert len(printed["turns"]) == 8
    assert printed["turns"][-1]["num_chars"] > 35_000
    assert all(turn["whole_ms"] > 0 and turn["cached_ms"] > 0 for turn in printed["turns"])
    assert printed["cached_ratio"] > 0
