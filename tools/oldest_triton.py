"""Put the oldest Triton that kernels must compile with beside the environment's own: `make oldest-triton`.

A test compiles with it where it is there. Which one that is, pyproject.toml says.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parent.parent


def oldest_version() -> str:
    """Return the lower bound in pyproject.toml."""
    bound = re.search(r'"triton>=([\d.]+)"', (_ROOT / "pyproject.toml").read_text())
    assert bound is not None, "pyproject.toml has no lower bound for Triton"
    return bound[1]


def folder() -> Path:
    """Return where it is, or would be: what is first on PYTHONPATH comes before the environment's own."""
    return _ROOT / ".venv" / f"triton-{oldest_version()}"


def is_there() -> bool:
    return (folder() / "triton").is_dir()


def main() -> None:
    if not is_there():
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        subprocess.run([*pip, "--no-deps", "--target", str(folder()), f"triton=={oldest_version()}"], check=True)


if __name__ == "__main__":
    main()
