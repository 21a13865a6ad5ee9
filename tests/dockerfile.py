"""What the Dockerfile says, for tests: stages, what is copied into them, and their environment."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Stage:
    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)
    """Names in capitals, and what follows them."""

    def all(self, instruction: str) -> list[str]:
        return [text for name, text in self.instructions if name == instruction]


def stages() -> dict[str, Stage]:
    """Return the stages by name, in their order."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    found: dict[str, Stage] = {}
    for line in filter(str.strip, text.replace("\\\n", " ").splitlines()):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = Stage(name, base)
        elif found:
            list(found.values())[-1].instructions.append((instruction, rest))
    return found


def environment(target: str) -> dict[str, str]:
    """Return the variables that a target's containers start with."""
    every = stages()
    stage: Stage | None = every[target]
    variables: dict[str, str] = {}
    while stage is not None:
        for text in stage.all("ENV"):
            variables = dict(pair.split("=", 1) for pair in shlex.split(text)) | variables
        stage = every.get(stage.base)
    return variables
