from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvern.services.router.identity.tenants import Tenants
from kvern.services.runtime.reloaded_file import parse_yaml
from kvern.services.runtime.reloading import Reloaded, UnusableFile


@pytest.mark.parametrize("broken", ["", "tenants: {acme", "unknown_tenants: !!bool maybe", "tenants: !!int ''"])
def test_changed_file_that_cannot_be_used_leaves_what_there_was_and_is_told_once(tmp_path: Path, broken: str) -> None:
    file = tmp_path / "tenants.yaml"

    def load() -> Tenants:
        try:
            return parse_yaml(file.read_bytes(), Tenants)
        except ValueError as error:
            raise UnusableFile(str(error)) from error

    file.write_text("tenants: {acme: {}}")
    tenants = Reloaded([file], load)
    file.write_text(broken)
    with capture_logs() as logs:
        for _ in range(2):
            assert list(tenants.get().tenants) == ["acme"]
    assert [line["log_level"] for line in logs] == ["error"]
    file.write_text("tenants: {other: {}}")
    assert list(tenants.get().tenants) == ["other"]
