"""How the command prints: answers and tables on stdout, everything about them on stderr."""

from __future__ import annotations

import sys

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from rich import box
from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 200
"""Columns where no terminal sets a width: tables are not cut for whoever reads the pipe."""


def stdout_console() -> Console:
    return _console(stderr=False)


def stderr_console() -> Console:
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    # No markup: model names and logs may hold brackets.
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=width)


def print_json(message: Message) -> None:
    """Print a message as one JSON line, fields named as in the proto."""
    line = MessageToJson(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=None
    )
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def table(*columns: str) -> Table:
    """Return an empty table; columns that end in # hold numbers."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        result.add_column(column.removesuffix("#"), justify="right" if column.endswith("#") else "left")
    return result
