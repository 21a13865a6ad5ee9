"""`kvern tokenize`: what the model sees."""

from __future__ import annotations

import click

from kvern.cli.options import json_option, model_option, server_option
from kvern.cli.output import print_json
from kvern.client import Client


@click.command()
@click.argument("text")
@server_option
@model_option
@json_option
def tokenize(text: str, server: str, model: str | None, as_json: bool) -> None:
    """Print the token ids of TEXT."""
    with Client(server) as client:
        response = client.tokenize(text, model=model or "")
    if as_json:
        print_json(response)
    else:
        click.echo(" ".join(map(str, response.ids)))
