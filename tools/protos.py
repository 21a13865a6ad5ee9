"""Generate src/kvern/v1 from protos/, or check that it is what would be generated and that the protos are sound.

python tools/protos.py generate|check
"""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
GENERATED = ROOT / "src" / "kvern" / "v1"
PUBLISHED_BRANCH = "main"


def generate(out: Path) -> None:
    """Write modules and type stubs of every proto under `out`/kvern/v1."""
    # protoc finds its plugins on the path, and they lie beside the interpreter.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    plugins = [f"--{plugin}_out={out}" for plugin in ("python", "grpc_python", "mypy", "mypy_grpc")]
    files = sorted(str(proto.relative_to(PROTOS)) for proto in PROTOS.rglob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *plugins, *files]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)


def stale() -> list[str]:
    """Return the names of generated files that are missing, left over, or other than their protos give."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / "kvern" / "v1"
        names = {path.name for place in (fresh, GENERATED) for path in place.glob("*_pb2*.py*")}
        _, mismatched, missing = filecmp.cmpfiles(fresh, GENERATED, names, shallow=False)
    return sorted([*mismatched, *missing])


def check() -> None:
    """Exit with a message unless the generated code is fresh and buf finds nothing to say."""
    _buf("lint", str(PROTOS))
    if _is_published():
        _buf("breaking", str(PROTOS), "--against", f"{ROOT / '.git'}#branch={PUBLISHED_BRANCH},subdir=protos")
    if names := stale():
        sys.exit(f"run `make protos`: src/kvern/v1 is not what protos/ gives: {', '.join(names)}")


def _buf(*arguments: str) -> None:
    done = subprocess.run([str(Path(sys.executable).parent / "buf"), *arguments], check=False)
    if done.returncode != 0:
        sys.exit(f"buf {arguments[0]} found the above")


def _is_published() -> bool:
    """Whether the branch that clients build on has protos to compare with."""
    command = ["git", "cat-file", "-e", f"{PUBLISHED_BRANCH}:protos/buf.yaml"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    {"generate": lambda: generate(ROOT / "src"), "check": check}[sys.argv[1]]()
