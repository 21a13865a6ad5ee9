from __future__ import annotations

from pathlib import Path

import pytest

from kvern.services.runtime.secret_file import read_digest_key, read_secret
from kvern.services.runtime.settings import SettingsError


def test_secret_is_read_without_the_space_around_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("s" * 32 + "\n")
    assert read_secret(file, "x") == b"s" * 32
    key = read_digest_key(file)
    assert len(key) == 32
    assert key != b"s" * 32


@pytest.mark.parametrize("text", ["", "short", "s" * 31 + "\n", "s" * 5000])
def test_file_that_holds_no_secret_is_refused_naming_setting_and_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    with pytest.raises(SettingsError, match=rf"^digest_key_file: {file} must hold 32 to 4096 bytes"):
        read_digest_key(file)


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^salt: cannot read .*none: No such file"):
        read_secret(tmp_path / "none", "salt")
