"""How many cores a process may keep busy, from files as the kernel writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvern.services.engine.settings import EngineSettings
from kvern.services.runtime.cores import usable_cores


@pytest.mark.parametrize(
    ("files", "num_cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "99900000 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_cores_are_those_of_the_machine_or_of_the_containers_limit(
    files: dict[str, str], num_cores: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert usable_cores(tmp_path) == (num_cores or 8)


def test_engine_is_told_of_the_cores_it_may_use() -> None:
    settings = EngineSettings.load(["--listen=unix:/tmp/engine.sock"], prog="engine", environ={})
    assert settings.engine_config(Path("model")).max_threads == usable_cores()
