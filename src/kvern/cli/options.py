"""Options that several commands share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import click
import grpc

from kvern.client import DEFAULT_ADDRESS, Client, GenerateOptions

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

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def _tls_option(flag: str, meaning: str) -> Callable[[_Function], _Function]:
    envvar = f"KVERN_{flag.removeprefix('--').replace('-', '_').upper()}"
    return click.option(flag, type=_FILE, metavar="FILE", envvar=envvar, show_envvar=True, help=meaning)


API_KEY_VARIABLE = "KVERN_API_KEY"

api_key_option = click.option(
    "--api-key-file",
    type=_FILE,
    metavar="FILE",
    envvar="KVERN_API_KEY_FILE",
    show_envvar=True,
    help=f"File with the API key or token to show it. Or give that itself in {API_KEY_VARIABLE}.",
)

_CONNECTION_OPTIONS = (
    server_option,
    _tls_option("--tls-ca", "Call it in TLS, and trust the authorities in this PEM file."),
    _tls_option("--tls-cert", "Certificate to show it, where it asks for one."),
    _tls_option("--tls-key", "The certificate's key."),
    click.option(
        "--tls-server-name",
        metavar="NAME",
        envvar="KVERN_TLS_SERVER_NAME",
        show_envvar=True,
        help="Name in its certificate, where that is not the one in --server: through a forwarded port, say.",
    ),
    api_key_option,
    click.option("--plaintext-api-key", is_flag=True, help="Send the key without TLS, though not to this machine."),
)


@dataclass(frozen=True)
class Server:
    """The Kvern that a command talks to."""

    address: str
    credentials: grpc.ChannelCredentials | None
    server_name: str | None = None
    """The name in its certificate. None: the one in its address."""
    api_key: str = field(default="", repr=False)
    plaintext_api_key: bool = False

    def connect(self) -> Client:
        try:
            return Client(
                self.address,
                credentials=self.credentials,
                authority=self.server_name,
                api_key=self.api_key,
                plaintext_api_key=self.plaintext_api_key,
            )
        except ValueError as error:
            raise click.UsageError(f"{error} (--tls-ca, --plaintext-api-key)") from error


def connection_options(function: _Function) -> _Function:
    """Add the options that say which Kvern to talk to, and how. The command gets them as `server`, a Server."""

    @functools.wraps(function)
    def command(
        *arguments: Any,
        server: str,
        tls_ca: Path | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        tls_server_name: str | None,
        api_key_file: Path | None,
        plaintext_api_key: bool,
        **options: Any,
    ) -> Any:
        if tls_server_name is not None and tls_ca is None:
            raise click.UsageError("--tls-server-name needs --tls-ca")
        credentials = _credentials(tls_ca, tls_cert, tls_key)
        connection = Server(server, credentials, tls_server_name, api_key_from(api_key_file), plaintext_api_key)
        return function(*arguments, server=connection, **options)

    for option in reversed(_CONNECTION_OPTIONS):
        command = option(command)
    return cast(_Function, command)


def api_key_from(file: Path | None) -> str:
    """Return the key in a file, or else in the environment; empty where there is none."""
    return os.environ.get(API_KEY_VARIABLE, "") if file is None else file.read_text().strip()


def _credentials(ca: Path | None, certificate: Path | None, key: Path | None) -> grpc.ChannelCredentials | None:
    if (certificate is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key must be given together")
    if ca is None and certificate is not None:
        raise click.UsageError("--tls-cert needs --tls-ca")
    return None if ca is None else grpc.ssl_channel_credentials(*map(_read, (ca, key, certificate)))


def _read(file: Path | None) -> bytes | None:
    return None if file is None else file.read_bytes()


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
