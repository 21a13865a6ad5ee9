"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import click

from kvern.client import DEFAULT_ADDRESS, GenerateOptions

_Function = TypeVar("_Function", bound=Callable[..., Any])

server_option = click.option(
    "--server",
    metavar="HOST:PORT",
    default=DEFAULT_ADDRESS,
    envvar="KVERN_SERVER",
    show_default=True,
    show_envvar=True,
    help="The Kvern to talk to.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print each response message as one JSON line.")

model_option = click.option("--model", metavar="NAME", help="Served model, where there are several.")

_UINT32 = click.IntRange(0, 2**32 - 1)
_UINT64 = click.IntRange(0, 2**64 - 1)

_GENERATION_OPTIONS = (
    model_option,
    click.option("--max-tokens", type=_UINT32, help="Most tokens to generate. [default: what fits]"),
    click.option("--temperature", type=float, help="0 always takes the likeliest token. [default: 1]"),
    click.option("--top-p", type=float, help="Sample from the likeliest tokens with this share together. [default: 1]"),
    click.option("--top-k", type=_UINT32, help="Sample from this many likeliest tokens. [default: all]"),
    click.option("--seed", type=_UINT64, help="The same seed draws the same tokens."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times."),
    click.option("--stats", is_flag=True, help="Print tokens and times on stderr afterwards."),
)


def generation_options(function: _Function) -> _Function:
    """Add the options of a generation: those of `GenerateOptions`, and --stats."""
    for option in reversed(_GENERATION_OPTIONS):
        function = option(function)
    return function


def given(options: Mapping[str, Any]) -> GenerateOptions:
    """Keep the options that were given: the server has its own defaults."""
    return cast(GenerateOptions, {name: value for name, value in options.items() if value not in (None, ())})
