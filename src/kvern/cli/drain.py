"""`kvern drain`: take a replica out of the choice."""

from __future__ import annotations

import click

from kvern.cli.options import Server, connection_options, json_option
from kvern.cli.output import print_json
from kvern.v1.replica_pb2 import ReplicaState


@click.command()
@click.argument("replica")
@click.option("--undo", is_flag=True, help="Let it take requests again.")
@connection_options
@json_option
def drain(replica: str, undo: bool, server: Server, as_json: bool) -> None:
    """Let REPLICA, an id or address that kvern status shows, finish what it runs and take nothing new.

    All routers see it within a second or two. It lasts until --undo, or until the replica starts anew.
    """
    with server.connect() as client:
        response = client.drain_replica(replica, undo=undo)
    if as_json:
        print_json(response)
        return
    state = ReplicaState.Name(response.replica.state).removeprefix("REPLICA_STATE_").lower()
    click.echo(f"{response.replica.id}: {state}, {response.replica.load.num_streams} requests in flight")
