"""A model that cannot be served ends `kvern up` with one clear message, and nothing stays behind."""

from __future__ import annotations

from pathlib import Path

from kvern.services.runtime.model_source import find_model
from tests.up_process import UpProcess


def test_corrupt_model_file_ends_up_with_its_reason(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    with find_model("smollm2").path.open("rb") as source:
        damaged.write_bytes(source.read(4_000_000))
    with UpProcess(tmp_path, str(damaged)) as up:
        assert up.process.wait(90) == 1
    assert "damaged.gguf" in up.output
    assert "Traceback" not in up.output
    assert not up.children()
