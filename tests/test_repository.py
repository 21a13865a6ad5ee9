"""What holds for the repository as a whole: links, generated code, import rules, what its documents point to."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ["engine", "kernels", "services"]
DOCUMENTS = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

TORCHLESS = ["kvern.cli", "kvern.client", "kvern.supervisor", "kvern.engine.block_hash", "kvern.engine.scheduler"]
TORCHLESS += [f"kvern.services.{name}.__main__" for name in ("gateway", "router", "tokenizer", "detokenizer")]
TORCHLESS += ["kvern.services.detokenizer.smg.server"]

_IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
"""


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", LINKED)
def test_link_in_package_leads_to_top_level_folder(name: str) -> None:
    assert os.readlink(ROOT / "src" / "kvern" / name) == f"../../{name}"


@pytest.mark.parametrize("name", LINKED)
def test_bare_name_is_not_importable(name: str) -> None:
    # A bare `kernels` would be taken by transformers for the library of that name.
    assert importlib.util.find_spec(name) is None


def test_generated_code_is_what_protos_give() -> None:
    done = run(sys.executable, "tools/protos.py", "check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_import_contracts_hold() -> None:
    done = run(Path(sys.executable).parent / "lint-imports", "--no-cache")
    assert done.returncode == 0, done.stdout


def test_import_of_what_is_outside_the_engine_loads_no_torch() -> None:
    done = run(sys.executable, "-P", "-c", _IMPORT_ALL, *TORCHLESS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS)
def test_document_links_to_files_that_exist(document: str) -> None:
    folder = (ROOT / document).parent
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / document).read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (folder / target).exists()] == []
