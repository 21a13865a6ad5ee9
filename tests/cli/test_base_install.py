"""The base install alone: the client and the command, without the services and the engine."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvern
from tests.up_process import UpProcess

_NAME_END = re.compile(r"[^\w.-]")


def _distributions(name: str) -> set[str]:
    """Return a distribution and what it needs without extras."""
    found = {name}
    for requirement in importlib.metadata.requires(name) or ():
        wanted, _, condition = requirement.partition(";")
        if not condition:
            found |= _distributions(_NAME_END.split(wanted)[0])
    return found


@pytest.fixture(scope="module")
def base_install(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of the base install and no others."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "kvern").symlink_to(Path(kvern.__file__).parent)
    for name in _distributions("kvern") - {"kvern"}:
        for file in importlib.metadata.files(name) or ():
            top = Path(str(file)).parts[0]
            link = folder / top
            if top != ".." and not link.exists():
                link.symlink_to(Path(str(importlib.metadata.distribution(name).locate_file(top))))
    return folder


def _run(base_install: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from kvern.cli import main; sys.argv[0] = 'kvern'; main()"
    environ = {**os.environ, "PYTHONPATH": str(base_install)}
    # -S: nothing of this environment's site-packages.
    command = [sys.executable, "-S", "-c", program, *arguments]
    return subprocess.run(command, env=environ, cwd=base_install, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "a", "--max-tokens", "1"),
        ("chat", "a", "--max-tokens", "1"),
        ("tokenize", "a"),
        ("models",),
        ("status",),
    ],
    ids=lambda command: command[0],
)
def test_client_command_works_with_the_base_install(
    base_install: Path, running_set: UpProcess, command: tuple[str, ...]
) -> None:
    done = _run(base_install, *command, "--server", running_set.listen)
    assert (done.returncode, done.stderr) == (0, "")


def test_up_with_the_base_install_says_what_to_install(base_install: Path) -> None:
    done = _run(base_install, "up")
    assert done.returncode == 1
    assert "pip install 'kvern[engine]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_capacity_works_with_the_base_install(base_install: Path, smollm2_path: Path) -> None:
    done = _run(base_install, "capacity", str(smollm2_path), "--gpu", "l4")
    assert (done.returncode, done.stderr) == (0, "")
    assert "134.5 M parameters" in done.stdout


def test_capacity_of_a_hub_model_with_the_base_install_says_what_to_install(base_install: Path) -> None:
    done = _run(base_install, "capacity", "owner/name", "--gpu", "l4")
    assert done.returncode == 1
    assert "pip install 'kvern[services]'" in done.stderr
