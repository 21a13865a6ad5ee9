"""`kvern models`: what can be asked for."""

from __future__ import annotations

import click

from kvern.cli.options import json_option, server_option
from kvern.cli.output import print_json, stdout_console, table
from kvern.client import Client


@click.command()
@server_option
@json_option
def models(server: str, as_json: bool) -> None:
    """List the models that are served."""
    with Client(server) as client:
        response = client.list_models()
    if as_json:
        print_json(response)
        return
    rows = table("model", "context#", "vocabulary#", "block size#", "ready replicas#")
    for model in response.models:
        numbers = (model.max_context, model.vocab_size, model.block_size, model.ready_replicas)
        rows.add_row(model.name, *(f"{number:,}" for number in numbers))
    stdout_console().print(rows)
