"""The services' log lines, made readable: they are JSON, one event a line, save for what a crash prints."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TAIL_BYTES = 16 * 1024
_TAIL_LINES = 12

_SHOWN_APART = {"timestamp", "level", "event", "service", "logger", "exception"}


def parse(line: str) -> dict[str, Any] | None:
    """Return the event in a line, None if it is plain text."""
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) else None


def render(line: str) -> str:
    """Return a line as a person reads it: time, level, event, then the rest as key=value."""
    event = parse(line)
    if event is None:
        return line
    clock = str(event.get("timestamp", ""))[11:23]
    return f"{clock} {event.get('level', ''):<8} {describe(event)}"


def describe(event: Mapping[str, Any]) -> str:
    """Return what an event says, without when and how loud."""
    rest = [f"{key}={_brief(value)}" for key, value in event.items() if key not in _SHOWN_APART]
    return " ".join([str(event.get("event", "")), *rest])


def _brief(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def tail(path: Path) -> list[str]:
    """Return the last lines of a log file, none if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except FileNotFoundError:
        return []


@dataclass(frozen=True, slots=True)
class News:
    """What a process is at."""

    text: str
    share_done: float | None = None
    """0 to 1. None: it does not say."""


def last_news(path: Path) -> News:
    """Return what the newest event in a log file says, nothing if there is none."""
    events = [event for event in map(parse, tail(path)) if event is not None]
    if not events:
        return News("")
    if "progress" in events[-1]:
        return News(str(events[-1]["what"]), float(events[-1]["progress"]))
    return News(describe(events[-1]))


def last_words(path: Path) -> str:
    """Return why a process ended, as far as its log tells: its critical event, else its last lines."""
    lines = tail(path)
    for event in map(parse, reversed(lines)):
        if event is not None and event.get("level") == "critical":
            return str(event.get("event", ""))
    return "\n".join(map(render, lines))
