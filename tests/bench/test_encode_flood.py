"""The benchmark of a flood of texts counts what becomes of each, and probes meanwhile."""

from __future__ import annotations

import json

import encode_flood
from click.testing import CliRunner


def test_flood_bench_counts_every_call() -> None:
    arguments = ["--calls", "6", "--megabytes", "0.05", "--json"]
    printed = json.loads(CliRunner().invoke(encode_flood.main, arguments, catch_exceptions=False).output)
    assert (printed["encoded"], printed["refused"]) == (6, 0)
    assert printed["health_ms_max"] > 0
    assert printed["small_ms_max"] > 0
    assert printed["peak_rss_mb"] > 10
