"""What `make gpu-check` finds, and the report of it: a JSON file, and a table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact, a figure, or whether something is right."""

    name: str
    value: float | str | None = None
    """None: nothing but whether it is right."""
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    """The aim of a figure. What misses it is slow, not wrong."""
    error: str = ""
    """What is wrong."""

    @property
    def is_met(self) -> bool | None:
        """None: there is no aim."""
        if not isinstance(self.value, float) or (self.at_least is None and self.at_most is None):
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


class Status(Enum):
    """How a stage ended."""

    DONE = "done"
    LATE = "late"
    """Stopped at its deadline. What it had found by then counts."""
    FAILED = "failed"


@dataclass(slots=True)
class StageReport:
    """One stage, as it went."""

    name: str
    deadline_s: float
    status: Status = Status.DONE
    seconds: float = 0.0
    error: str = ""
    """The end of what it wrote where it failed."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_wrong(self) -> bool:
        return self.status is Status.FAILED or any(finding.error for finding in self.findings)


def write_report(path: Path, stages: list[StageReport]) -> None:
    """Write the file anew: a reader sees the old one or the new one."""
    content = {"stages": [asdict(stage) | {"status": stage.status.value} for stage in stages]}
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(beside, path)


def read_figures(path: Path) -> dict[str, float]:
    """Return the figures of a report by name."""
    stages: list[dict[str, Any]] = json.loads(path.read_text())["stages"]
    found = (finding for stage in stages for finding in stage["findings"])
    return {finding["name"]: finding["value"] for finding in found if isinstance(finding["value"], float)}


def format_table(stages: list[StageReport]) -> str:
    """Return a line for each fact and figure and for what is wrong, and one for each stage."""
    rows = [("", "found", "aim", "")]
    for stage in stages:
        rows += _stage_rows(stage)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        f"{name:{widths[0]}}  {value:>{widths[1]}}  {aim:>{widths[2]}}  {met}".rstrip()
        for name, value, aim, met in rows
    )
    return "\n".join(lines)


def _stage_rows(stage: StageReport) -> Iterator[tuple[str, str, str, str]]:
    verdicts = [finding for finding in stage.findings if finding.value is None]
    wrong = [finding for finding in stage.findings if finding.error]
    right = f", {len(verdicts) - len(wrong)} of {len(verdicts)} right" if verdicts else ""
    ended = "" if stage.status is Status.DONE else stage.status.value.upper()
    yield f"{stage.name}{right}", f"{stage.seconds:,.1f} s", f"<= {stage.deadline_s:,.0f} s", ended
    for finding in stage.findings:
        if finding.value is not None:
            met = {None: "", True: "met", False: "MISSED"}[finding.is_met]
            yield f"  {finding.name}", _with_unit(finding.value, finding.unit), _aim(finding), met
    for finding in wrong:
        yield f"  {finding.name}: {finding.error.splitlines()[0]}", "", "", "WRONG"
    if stage.error:
        yield f"  {stage.error.splitlines()[-1]}", "", "", ""


def _aim(finding: Finding) -> str:
    if finding.at_least is not None:
        return f">= {_with_unit(finding.at_least, finding.unit)}"
    return "" if finding.at_most is None else f"<= {_with_unit(finding.at_most, finding.unit)}"


def _with_unit(value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    if unit == "%":
        return f"{value:.1%}"
    return f"{value:,.{0 if value >= 1000 else 3}f} {unit}".rstrip()
