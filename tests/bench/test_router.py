"""The benchmark of the index measures everything it names, and checks what lookups find."""

from __future__ import annotations

import json

import pytest
import router
from click.testing import CliRunner

from kvern.services.engine import replica_index


def test_router_bench_prints_every_number_with_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_index, "COMMAND_TIMEOUT_S", 60.0)  # a Redis may stand still, on a busy machine
    sizes = ["--replicas", "3", "--num-blocks", "1500", "--prompt-tokens", "1600", "--lookups", "20"]
    printed = json.loads(CliRunner().invoke(router.main, [*sizes, "--json"], catch_exceptions=False).output)
    assert set(router.TARGETS) <= set(printed)
    assert all(printed[name] > 0 for name in router.TARGETS)
