"""What a terminal shows while a set starts."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvern.cli.set_command import Progress
from kvern.supervisor.log_lines import News


@pytest.mark.parametrize(
    ("news", "expected"),
    [
        (News("capturing steps of 64 tokens", 0.5), [" 50%", "engine-0, gateway: capturing steps of 64 tokens"]),
        (News("captured", 1.0), ["100%", "engine-0, gateway: captured"]),
        (News("starting [1/2]"), ["waiting for engine-0, gateway: starting"]),
        (News(""), ["waiting for engine-0, gateway\n"]),
    ],
)
def test_what_the_engine_is_at_is_shown_as_far_as_it_is(news: News, expected: list[str]) -> None:
    shown = io.StringIO()
    progress = Progress(Console(file=shown, width=100, markup=False), on_ready=lambda: None)
    progress.waiting(["engine-0", "gateway"], news)
    progress._console.print(progress._status.renderable)
    assert all(part in shown.getvalue() for part in expected), shown.getvalue()
    assert shown.getvalue().count("━") == 24 * (news.share_done or 0)
    assert len(shown.getvalue().splitlines()) == 1
