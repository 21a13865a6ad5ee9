"""What an install brings, and what a built package carries."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import constraints
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINKED = ["engine", "kernels", "services"]
SOURCES = ["LICENSE", "MANIFEST.in", "README.md", "constraints.txt", "pyproject.toml", "protos", "src", *LINKED]


@pytest.mark.parametrize("extra", ["", "services"])
def test_install_without_engine_brings_no_torch(extra: str) -> None:
    assert "torch" not in constraints.needed_by("kvern", extra)


def test_base_install_brings_no_service_libraries() -> None:
    brought = constraints.needed_by("kvern", "")
    assert {"grpcio", "protobuf", "click", "rich"} <= brought
    assert brought.isdisjoint({"transformers", "uvicorn", "pydantic", "numpy"})


def test_engine_extra_brings_torch_and_services() -> None:
    assert {"torch", "transformers", "grpcio-health-checking"} <= constraints.needed_by("kvern", "engine")


def test_constraints_file_pins_all_that_development_needs() -> None:
    text = (ROOT / "constraints.txt").read_text()
    pinned = {line.partition("==")[0] for line in text.splitlines() if "==" in line}
    assert constraints.needed_by("kvern", "dev") - pinned == {"kvern", *constraints.UNPINNED}


def _declared(extra: str) -> set[str]:
    """Return the distributions that pyproject.toml names for an extra and those it includes; "" is the base install."""
    lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    names = set() if extra == "" else _declared("")
    for requirement in map(Requirement, lines):
        names.add(canonicalize_name(requirement.name))
        names |= set().union(*(_declared(each) for each in requirement.extras if requirement.name == "kvern"))
    return names


def _imported(part: str) -> set[str]:
    """Return the top-level names of other people's packages that the files of a part import."""
    files = [ROOT / part] if part.endswith(".py") else (ROOT / part).rglob("*.py")
    own = {"kvern", "tests"} | {path.stem for folder in ("bench", "tools") for path in (ROOT / folder).glob("*.py")}
    names = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - own - sys.stdlib_module_names


@pytest.mark.parametrize(
    ("part", "extra"),
    [
        ("src/kvern/client", ""),
        ("src/kvern/v1", ""),
        ("src/kvern/cli", ""),
        ("src/kvern/supervisor", "services"),
        ("services/runtime", "services"),
        ("services/tokenizer", "services"),
        ("services/detokenizer", "services"),
        ("services/router", "services"),
        ("services/gateway", "services"),
        ("services/engine", "engine"),
        ("engine", "gpu"),
        ("kernels", "gpu"),
        ("bench", "dev"),
        ("tests", "dev"),
        ("tools", "dev"),
    ],
)
def test_library_that_part_imports_is_declared(part: str, extra: str) -> None:
    owners = metadata.packages_distributions()
    declared = _declared(extra)
    # `kvern doctor` looks whether torch works, if it is there. pydantic_core is a part of pydantic. bench/peer_llama.py
    # runs in an environment of its own.
    names = _imported(part) - {"pydantic_core", "xllamacpp"} - ({"torch"} if part == "src/kvern/cli" else set())
    undeclared = {name for name in names if declared.isdisjoint(map(canonicalize_name, owners.get(name, [])))}
    assert undeclared == set()


def _build(kind: str, source: Path, out: Path) -> Path:
    program = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    out.mkdir()
    subprocess.run([sys.executable, "-c", program, str(out)], cwd=source, check=True, capture_output=True)
    return next(out.iterdir())


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, built in a copy so that no build output lands in the tree."""
    folder = tmp_path_factory.mktemp("sdist")
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree)
    return _build("sdist", tree, folder / "out")


def test_sdist_carries_protos_and_linked_packages_as_files(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert "protos/kvern/v1/inference.proto" in files
    assert {f"src/kvern/{name}/__init__.py" for name in LINKED} <= files


def test_wheel_from_sdist_carries_every_module(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    wheel = _build("wheel", next(tmp_path.iterdir()), tmp_path / "out")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("kvern/")}
    modules = {path.relative_to(ROOT).as_posix() for name in LINKED for path in (ROOT / name).rglob("*.py")}
    own = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "kvern" / "v1").glob("*.py*")}
    assert {f"kvern/{module}" for module in modules} | own <= packed
    assert "kvern/py.typed" in packed
