"""What a client asked for comes whole, whoever dies in between."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from kvern.client import Client, Delta, Event, RetryPolicy
from tests.e2e.generation import collect
from tests.up_process import UpProcess

PROMPT = "Once upon a time"
MAX_TOKENS = 64
PATIENT = RetryPolicy(max_resumptions=60, max_delay_s=1.0)
"""A process that is started again needs its time on a busy machine."""


@pytest.mark.parametrize("name", ["engine-0", "router"])
def test_stream_whose_server_is_killed_is_what_it_would_have_been(running_set: UpProcess, name: str) -> None:
    with Client(running_set.listen, retry=PATIENT) as client:
        undisturbed = collect(client.generate(PROMPT, max_tokens=MAX_TOKENS, temperature=0))
        stream = client.generate(PROMPT, max_tokens=MAX_TOKENS, temperature=0, request_id=f"survives-{name}")
        survived = collect(_kill_on_the_way(running_set, name, stream))
    assert survived.text == undisturbed.text
    assert survived.finished.reason == undisturbed.finished.reason
    assert survived.finished.usage.completion_tokens == undisturbed.finished.usage.completion_tokens
    assert survived.finished.timing.total_s > survived.finished.timing.time_to_first_token_s
    running_set.wait_idle()


def _kill_on_the_way(running_set: UpProcess, name: str, events: Iterator[Event]) -> Iterator[Event]:
    """Pass events on, and kill a service behind the fifth Delta."""
    num_deltas = 0
    for event in events:
        num_deltas += isinstance(event, Delta)
        if isinstance(event, Delta) and num_deltas == 5:
            os.kill(running_set.children()[name], signal.SIGKILL)
        yield event
