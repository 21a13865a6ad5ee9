"""`kvern generate`: continue a text."""

from __future__ import annotations

from typing import Any

import click

from kvern.cli.answer import print_answer
from kvern.cli.options import generation_options, given, json_option, server_option
from kvern.client import Client


@click.command()
@click.argument("prompt")
@server_option
@generation_options
@json_option
def generate(prompt: str, server: str, as_json: bool, stats: bool, **options: Any) -> None:
    """Continue PROMPT, as it is, without a chat template."""
    with Client(server) as client:
        print_answer(client.generate(prompt, **given(options)), as_json=as_json, stats=stats)
