"""What an engine decides before it loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvern.engine.config import EngineConfig
from kvern.engine.startup import _with_threads_for_each_rank


@pytest.mark.parametrize(
    ("given", "num_threads"),
    [
        ({}, 12),
        ({"max_threads": 16}, 12),
        ({"max_threads": 4}, 4),
        ({"max_threads": 4, "tensor_parallel_size": 2}, 2),
        ({"max_threads": 1, "tensor_parallel_size": 2}, 1),
        ({"max_threads": 4, "num_threads": 6}, 6),
    ],
)
def test_threads_are_torchs_or_a_containers_cores_unless_they_are_given(
    given: dict[str, int], num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    config = EngineConfig(model_path=Path("model"), **given)
    assert _with_threads_for_each_rank(config).num_threads == num_threads
