"""`kvern generate`: continue a text."""

from __future__ import annotations

from typing import Any

import click

from kvern.cli.answer import print_answer
from kvern.cli.options import Server, connection_options, generation_options, given, json_option


@click.command()
@click.argument("prompt")
@connection_options
@generation_options
@json_option
def generate(prompt: str, server: Server, as_json: bool, stats: bool, **options: Any) -> None:
    """Continue PROMPT, as it is, without a chat template."""
    with server.connect() as client:
        print_answer(client.generate(prompt, **given(options)), as_json=as_json, stats=stats)
