"""`kvern status`: the replicas and how busy they are."""

from __future__ import annotations

import time

import click
from rich.live import Live
from rich.table import Table

from kvern.cli.options import Server, connection_options, json_option
from kvern.cli.output import print_json, stdout_console, table
from kvern.client import Client
from kvern.v1.replica_pb2 import ReplicaState
from kvern.v1.router_pb2 import ListReplicasResponse, ReplicaStatus

_PERIOD_S = 1.0


@click.command()
@connection_options
@click.option("--watch", is_flag=True, help="Keep showing it, once a second.")
@json_option
def status(server: Server, watch: bool, as_json: bool) -> None:
    """Show the replicas: state, KV memory in use, requests running and waiting, open streams."""
    with server.connect() as client:
        if as_json:
            _print_json(client, watch=watch)
        elif watch:
            _watch(client)
        else:
            stdout_console().print(_table(client.list_replicas()))


def _print_json(client: Client, *, watch: bool) -> None:
    print_json(client.list_replicas())
    while watch:
        time.sleep(_PERIOD_S)
        print_json(client.list_replicas())


def _watch(client: Client) -> None:
    with Live(_table(client.list_replicas()), console=stdout_console(), auto_refresh=False) as live:
        while True:
            time.sleep(_PERIOD_S)
            live.update(_table(client.list_replicas()), refresh=True)


def _table(response: ListReplicasResponse) -> Table:
    rows = table("replica", "found in", "state", "model", "KV#", "blocks#", "running#", "waiting#", "streams#")
    for replica in response.replicas:
        load, blocks = replica.load, replica.engine.num_blocks
        rows.add_row(
            _name(replica),
            _sources(replica),
            _state(replica),
            replica.engine.model,
            f"{load.num_used_blocks / blocks:.0%}" if blocks else "",
            f"{load.num_used_blocks:,}/{blocks:,}",
            str(load.num_running),
            str(load.num_waiting),
            str(load.num_streams),
        )
    return rows


def _name(replica: ReplicaStatus) -> str:
    return replica.address if replica.id == replica.address else f"{replica.id} at {replica.address}"


def _sources(replica: ReplicaStatus) -> str:
    found_in = {"list": replica.listed, "registry": replica.registered}
    return ", ".join(source for source, is_there in found_in.items() if is_there) or "neither now"


def _state(replica: ReplicaStatus) -> str:
    if not replica.reachable:
        return "unreachable"
    if replica.stalled:
        return "stalled"
    return ReplicaState.Name(replica.state).removeprefix("REPLICA_STATE_").lower()
