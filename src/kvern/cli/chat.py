"""`kvern chat`: one question, or a conversation."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import click

from kvern.cli.answer import GenerationFailed, print_answer, print_text
from kvern.cli.options import Server, connection_options, generation_options, given, json_option
from kvern.cli.output import stderr_console
from kvern.client import Client, Delta, Event, GenerateOptions, KvernError

_PROMPT = "> "


@click.command()
@click.argument("prompt", required=False)
@connection_options
@click.option("--system", metavar="TEXT", help="System message: how the model should behave.")
@generation_options
@json_option
def chat(prompt: str | None, server: Server, system: str | None, as_json: bool, stats: bool, **options: Any) -> None:
    """Answer PROMPT, or hold a conversation: without PROMPT each line of input is a message."""
    with server.connect() as client:
        conversation = Conversation(client, given(options), system=system, as_json=as_json, stats=stats)
        if prompt is not None:
            conversation.say(prompt)
        else:
            converse(conversation)


class Conversation:
    """What was said so far. The server keeps nothing; every turn sends it all, and finds most of it cached."""

    def __init__(
        self,
        client: Client,
        options: GenerateOptions,
        *,
        system: str | None = None,
        as_json: bool = False,
        stats: bool = False,
    ) -> None:
        self._client = client
        self._options = options
        self._as_json = as_json
        self._stats = stats
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def say(self, text: str) -> None:
        """Print the answer to a message. A turn without an answer is forgotten; one cut short keeps what came."""
        turn = [*self._messages, {"role": "user", "content": text}]
        parts: list[str] = []
        try:
            events = self._client.chat(turn, **self._options)
            print_answer(_recorded(events, parts), as_json=self._as_json, stats=self._stats)
        finally:
            if parts:
                self._messages = [*turn, {"role": "assistant", "content": "".join(parts)}]


def _recorded(events: Iterable[Event], parts: list[str]) -> Iterator[Event]:
    for event in events:
        if isinstance(event, Delta):
            parts.append(event.text)
        yield event


def converse(conversation: Conversation) -> None:
    """Take messages from stdin until its end. Ctrl-C ends an answer, or at the prompt the conversation."""
    for text in _lines():
        try:
            conversation.say(text)
        except KeyboardInterrupt:
            print_text("\n")
        except (KvernError, GenerationFailed) as error:
            stderr_console().print(str(error), style="red")


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from (line for line in map(str.strip, sys.stdin) if line)
        return
    import readline  # noqa: F401 (gives `input` line editing and history)

    while True:
        try:
            text = input(_PROMPT).strip()
        except EOFError:
            print_text("\n")
            return
        if text:
            yield text
