"""`kvern logs`: what the services of a local set say."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

import click

from kvern.cli.options import server_option
from kvern.supervisor.addresses import AddressError, parse_address
from kvern.supervisor.folders import log_folder
from kvern.supervisor.log_lines import parse, render

_PERIOD_S = 0.2


@click.command()
@click.argument("name", required=False)
@server_option
@click.option("--follow", "-f", is_flag=True, help="Go on with what is logged from now.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines as they were written.")
def logs(name: str | None, server: str, follow: bool, as_json: bool) -> None:
    """Print the logs of a set on this machine, of all its processes or of NAME (`engine`, `detokenizer-1`)."""
    files = [path.open(errors="replace") for path in _paths(server, name)]
    history = [(stamp, file, line) for file in files for stamp, line in _stamped(file)]
    for _, file, line in sorted(history, key=lambda entry: entry[0]):
        _print(file, line, as_json=as_json)
    while follow:
        for file in files:
            for line in file:
                _print(file, line, as_json=as_json)
        time.sleep(_PERIOD_S)


def _print(file: TextIO, line: str, *, as_json: bool) -> None:
    text = line.rstrip("\n")
    click.echo(text if as_json else f"{Path(file.name).stem:<14} {render(text)}")


def _paths(server: str, name: str | None) -> list[Path]:
    try:
        folder = log_folder(parse_address(server).port)
    except AddressError as error:
        raise click.BadParameter(str(error), param_hint="--server") from error
    paths = sorted(folder.glob("*.log"))
    if not paths:
        raise click.ClickException(f"no logs in {folder}: no Kvern was started with that port on this machine")
    chosen = [path for path in paths if name is None or name in (path.stem, path.stem.partition("-")[0])]
    if not chosen:
        raise click.BadParameter(f"{name}: one of {', '.join(path.stem for path in paths)}", param_hint="NAME")
    return chosen


def _stamped(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each line with its time. A line without one belongs to the line before it."""
    stamp = ""
    for line in lines:
        event = parse(line)
        if event is not None:
            stamp = str(event.get("timestamp", stamp))
        yield stamp, line
