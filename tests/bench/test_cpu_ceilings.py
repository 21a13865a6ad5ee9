"""The ceilings of a CPU are told by what was done in what time."""

from __future__ import annotations

import json

import cpu_ceilings
import pytest
from click.testing import CliRunner


def test_floor_is_the_longer_of_reading_and_multiplying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ceilings, "read_bytes_per_s", lambda: 40e9)
    monkeypatch.setattr(cpu_ceilings, "operations_per_s", lambda: 400e9)
    monkeypatch.setattr(cpu_ceilings, "weights_of", lambda model: 100_000_000)
    figures = json.loads(CliRunner().invoke(cpu_ceilings.main, ["--json"]).stdout)
    assert figures["step_floor_ms"] == pytest.approx({"1": 5.0, "16": 8.0, "64": 32.0})


def test_work_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of a GiB of ones, and a product."""
    monkeypatch.setattr(cpu_ceilings, "READ_BYTES", 2**22)
    monkeypatch.setattr(cpu_ceilings, "SIZE", 64)
    times = iter((0.5, 0.25, 0.125))
    monkeypatch.setattr(cpu_ceilings, "_shortest_s", lambda work: (work(), next(times))[1])
    assert cpu_ceilings.read_bytes_per_s() == 2**23
    assert cpu_ceilings.operations_per_s() == 2 * 64**3 * 8
