"""`kvern up`: the whole set on this machine."""

from __future__ import annotations

import signal
from types import FrameType

import click

from kvern.cli.output import stderr_console, stdout_console
from kvern.cli.ready import print_ready
from kvern.cli.set_command import Progress, SetCommand, address_option, local_set, replicas_option
from kvern.supervisor.addresses import Address
from kvern.supervisor.stop import StopRequest


@click.command(cls=SetCommand)
@click.argument("model", required=False)
@address_option("--listen", "Where clients connect.", "127.0.0.1:50051")
@address_option("--http", "Where the HTTP API is.", "127.0.0.1:8000")
@replicas_option
def up(model: str | None, listen: Address, http: Address, replicas: int, **settings: str | bool | None) -> None:
    """Start all services with MODEL, watch over them, and drain them on Ctrl-C.

    MODEL is a Hugging Face folder, a .gguf file, a hub id (owner/name), or smollm2, the default.
    """
    with local_set(model, listen, http, replicas, settings) as running:
        progress = Progress(stderr_console(), lambda: print_ready(running, stdout_console()))
        with progress:
            running.run(_stop_on_signals(), progress)


def _stop_on_signals() -> StopRequest:
    """Return a request that the first signal makes, and a second one forces."""
    stop = StopRequest()

    def handle(_number: int, _frame: FrameType | None) -> None:
        stop.forced = stop.requested
        stop.requested = True

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)
    return stop
