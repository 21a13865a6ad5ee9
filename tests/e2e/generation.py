"""Generations through the front door, reduced to what tests ask of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvern.client import Client, Delta, Event, Finished


@dataclass(frozen=True)
class Generation:
    text: str
    finished: Finished


def collect(events: Iterable[Event]) -> Generation:
    """Read a generation to its end."""
    received = list(events)
    text = "".join(event.text for event in received if isinstance(event, Delta))
    (finished,) = [event for event in received if isinstance(event, Finished)]
    return Generation(text, finished)


def ask(client: Client, question: str, max_tokens: int = 8) -> str:
    """Return the greedy answer to a question."""
    messages = [{"role": "user", "content": question}]
    return collect(client.chat(messages, max_tokens=max_tokens, temperature=0)).text


def assert_serves(client: Client) -> None:
    """A request of an ordinary kind is answered."""
    assert "Paris" in ask(client, "What is the capital of France?")
