"""`kvern reset-cache`: let replicas forget cached prompts."""

from __future__ import annotations

import click

from kvern.cli.options import Server, connection_options, json_option
from kvern.cli.output import print_json


@click.command("reset-cache")
@click.option("--replica", metavar="NAME", default="", help="Id or address of one replica.")
@click.option("--model", metavar="NAME", default="", help="All replicas of this model.")
@connection_options
@json_option
def reset_cache(replica: str, model: str, server: Server, as_json: bool) -> None:
    """Let a replica, or all of a model, forget the prompts they have cached. Requests that run go on."""
    if bool(replica) == bool(model):
        raise click.UsageError("give --replica or --model")
    with server.connect() as client:
        response = client.reset_cache(replica=replica, model=model)
    if as_json:
        print_json(response)
    else:
        for reset in response.replicas:
            click.echo(f"{reset.id}: {reset.error or 'reset'}")
    if any(reset.error for reset in response.replicas):
        raise click.exceptions.Exit(1)
