"""Logs for people: JSON lines rendered, the last words of a process found."""

from __future__ import annotations

import json
from pathlib import Path

from kvern.supervisor.log_lines import News, last_news, last_words, render

LOADING = json.dumps(
    {
        "event": "loading",
        "progress": 0.5,
        "what": "reading layer 3",
        "level": "info",
        "timestamp": "2030-01-02T03:04:05.678901Z",
        "service": "engine",
    }
)
CRITICAL = json.dumps({"event": "model: no such file", "level": "critical", "logger": "kvern"})


def test_json_line_renders_as_time_level_event_and_rest() -> None:
    assert render(LOADING).split() == ["03:04:05.678", "info", "loading", "progress=0.5", "what=reading", "layer", "3"]


def test_line_that_is_no_json_renders_as_it_is() -> None:
    assert render('  File "x.py", line 1') == '  File "x.py", line 1'
    assert render("{broken") == "{broken"


def test_last_words_are_the_critical_event(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text(f"{LOADING}\n{CRITICAL}\nafterwards\n")
    assert last_words(log) == "model: no such file"


def test_last_words_without_critical_event_are_the_tail(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text("\n".join(f"line {number}" for number in range(100)))
    assert last_words(log).splitlines()[-1] == "line 99"
    assert len(last_words(log).splitlines()) == 12


def test_last_news_are_of_the_newest_json_line(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    assert last_news(log) == News("")
    log.write_text(f"{CRITICAL}\n{LOADING}\nplain\n")
    assert last_news(log) == News("reading layer 3", share_done=0.5)
    log.write_text(f"{LOADING}\n{CRITICAL}\n")
    assert last_news(log) == News("model: no such file")
