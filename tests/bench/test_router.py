"""The benchmark of the index measures everything it names, and checks what lookups find."""

from __future__ import annotations

import json

import router
from click.testing import CliRunner


def test_router_bench_prints_every_number_with_a_target() -> None:
    sizes = ["--replicas", "3", "--num-blocks", "1500", "--prompt-tokens", "1600", "--lookups", "20"]
    printed = json.loads(CliRunner().invoke(router.main, [*sizes, "--json"], catch_exceptions=False).output)
    assert set(router.TARGETS) <= set(printed)
    assert all(printed[name] > 0 for name in router.TARGETS)
