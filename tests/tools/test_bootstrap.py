"""What `make` says and does before anything is installed."""

from __future__ import annotations

import ast
from pathlib import Path

import bootstrap
import environment
import pytest

SUPPORTED = ((3, 11, 2), "Linux", "x86_64")


def test_supported_machine_gives_no_reason() -> None:
    assert bootstrap.why_unsupported(*SUPPORTED) is None
    assert bootstrap.why_unsupported((3, 13, 0), "Linux", "aarch64") is None


@pytest.mark.parametrize(
    ("machine", "named"),
    [
        (((3, 10, 13), "Linux", "x86_64"), "Python 3.11"),
        (((3, 12, 0), "Darwin", "arm64"), "Darwin on arm64"),
        (((3, 12, 0), "Windows", "AMD64"), "Windows on AMD64"),
        (((3, 12, 0), "Linux", "riscv64"), "Linux on riscv64"),
    ],
)
def test_unsupported_machine_gives_one_line_that_names_the_lack(machine: tuple[object, ...], named: str) -> None:
    reason = bootstrap.why_unsupported(*machine)
    assert named in reason
    assert "\n" not in reason


def test_bootstrap_is_readable_by_old_python() -> None:
    source = Path(bootstrap.__file__).read_text()
    ast.parse(source, feature_version=(3, 6))
    assert "from __future__ import annotations" not in source  # a syntax error before 3.7


@pytest.mark.parametrize(("installed", "wanted", "enough"), [("dev", "run", True), ("run", "dev", False)])
def test_set_up_for_development_is_enough_for_run_only(installed: str, wanted: str, enough: bool) -> None:
    assert environment.satisfies(f"abc {installed}\n", "abc", wanted) is enough


def test_set_up_from_other_settings_is_not_enough() -> None:
    assert not environment.satisfies("abc dev\n", "abd", "run")


def test_torch_version_is_read_from_constraints(tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("torchvision==0.1\ntorch==2.13.0\n")
    assert environment.pinned_version(tmp_path / "constraints.txt", "torch") == "2.13.0"
