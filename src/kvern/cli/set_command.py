"""What `kvern up` and `kvern run` share: options, the check that the services are installed, errors, progress."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table

from kvern.supervisor.addresses import Address, AddressError, parse_address

if TYPE_CHECKING:
    from kvern.supervisor.local_set import LocalSet
    from kvern.supervisor.log_lines import News

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SPINNER_WIDTH = 3
_BAR_WIDTH = 24

_NEEDED = ("torch", "pydantic_settings", "grpc_health", "structlog", "transformers", "uvicorn")


def _address(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Address | None:
    try:
        return None if value is None else parse_address(value)
    except AddressError as error:
        raise click.BadParameter(str(error)) from error


def address_option(flag: str, meaning: str, default: str | None = None) -> Callable[[_Function], _Function]:
    """Return an option whose value is an Address."""
    return click.option(
        flag, callback=_address, metavar="HOST:PORT", default=default, show_default=default is not None, help=meaning
    )


replicas_option = click.option(
    "--replicas", type=click.IntRange(min=1), default=1, show_default=True, help="Engines, each with its detokenizer."
)


class SetCommand(click.Command):
    """A command that starts services: their settings are its options."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *self._setting_options]

    @cached_property
    def _setting_options(self) -> list[click.Parameter]:
        require_engine()
        from kvern.supervisor.launch import setting_fields

        own = {parameter.name for parameter in self.params}
        fields = setting_fields()
        return [_option(name, *fields[name]) for name in fields if name not in own]


def _option(name: str, is_flag: bool, meaning: str) -> click.Option:
    flag = name.replace("_", "-")
    if is_flag:
        return click.Option([f"--{flag}/--no-{flag}"], default=None, help=meaning)
    return click.Option([f"--{flag}"], metavar="VALUE", help=meaning)


def require_engine() -> None:
    """Refuse with what to do where the services or the engine are not installed."""
    missing = [module for module in _NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        raise click.ClickException(
            f"this needs the services and the engine ({missing[0]} is missing): pip install 'kvern[engine]'"
        )


@contextmanager
def local_set(
    model: str | None, listen: Address, http: Address, replicas: int, settings: Mapping[str, str | bool | None]
) -> Iterator[LocalSet]:
    """Claim a set. What a person can act on is one line; a wrong setting exits with 2, the rest with 1."""
    from kvern.services.runtime.model_source import ModelNotFound
    from kvern.services.runtime.settings import SettingsError
    from kvern.supervisor.folders import FolderError, SetRunning
    from kvern.supervisor.launch import SetOptions
    from kvern.supervisor.local_set import open_set
    from kvern.supervisor.supervisor import StartFailed

    given = {name: value for name, value in {**settings, "model": model}.items() if value is not None}
    try:
        with open_set(SetOptions(listen, http, replicas, given)) as opened:
            yield opened
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    except (ModelNotFound, AddressError, FolderError, SetRunning, StartFailed) as error:
        raise click.ClickException(str(error)) from error


class Progress:
    """Shows what happens to a set: a spinner while it starts on a terminal, lines elsewhere and afterwards.

    Where the engine tells how far it is with what it does, that is a bar beside the spinner.
    """

    def __init__(self, console: Console, on_ready: Callable[[], None]) -> None:
        self._console = console
        self._on_ready = on_ready
        self._status = console.status("starting")
        self.is_ready = False

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._status.stop()

    def waiting(self, names: Sequence[str], news: News) -> None:
        text = f"waiting for {', '.join(names)}: {news.text}".removesuffix(": ")
        if news.share_done is None:
            self._status.update(text[: self._console.width - _SPINNER_WIDTH])
        else:
            self._status.update(_beside_bar(text, news.share_done))

    def process_ready(self, name: str) -> None:
        if self.is_ready or not self._console.is_terminal:
            self._console.print(f"{name} is ready")

    def process_died(self, name: str, cause: str, restart_delay_s: float) -> None:
        self._console.print(f"{name} {cause}; starting it again in {restart_delay_s:g} s")

    def set_ready(self) -> None:
        self._status.stop()
        self.is_ready = True
        self._on_ready()

    def draining(self) -> None:
        self._console.print("draining; Ctrl-C again ends it at once")


def _beside_bar(text: str, share_done: float) -> Table:
    grid = Table.grid(padding=(0, 1))
    for _ in range(3):
        grid.add_column(no_wrap=True)
    grid.add_row(ProgressBar(total=1.0, completed=share_done, width=_BAR_WIDTH), f"{share_done:4.0%}", text)
    return grid
