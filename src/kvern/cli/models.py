"""`kvern models`: what can be asked for."""

from __future__ import annotations

import click

from kvern.cli.options import Server, connection_options, json_option
from kvern.cli.output import print_json, stdout_console, table


@click.command()
@connection_options
@json_option
def models(server: Server, as_json: bool) -> None:
    """List the models that are served."""
    with server.connect() as client:
        response = client.list_models()
    if as_json:
        print_json(response)
        return
    rows = table("model", "context#", "vocabulary#", "block size#", "ready replicas#")
    for model in response.models:
        numbers = (model.max_context, model.vocab_size, model.block_size, model.ready_replicas)
        rows.add_row(model.name, *(f"{number:,}" for number in numbers))
    stdout_console().print(rows)
