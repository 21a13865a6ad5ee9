"""`kvern tokenize`: what the model sees."""

from __future__ import annotations

import click

from kvern.cli.options import Server, connection_options, json_option, model_option
from kvern.cli.output import print_json


@click.command()
@click.argument("text")
@connection_options
@model_option
@json_option
def tokenize(text: str, server: Server, model: str | None, as_json: bool) -> None:
    """Print the token ids of TEXT."""
    with server.connect() as client:
        response = client.tokenize(text, model=model or "")
    if as_json:
        print_json(response)
    else:
        click.echo(" ".join(map(str, response.ids)))
