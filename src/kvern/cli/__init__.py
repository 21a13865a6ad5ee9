"""The `kvern` command."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from kvern.cli.capacity import capacity
from kvern.cli.chat import chat
from kvern.cli.doctor import doctor
from kvern.cli.download import download
from kvern.cli.drain import drain
from kvern.cli.generate import generate
from kvern.cli.keys import keys
from kvern.cli.logs import logs
from kvern.cli.models import models
from kvern.cli.reset_cache import reset_cache
from kvern.cli.route import route
from kvern.cli.run import run
from kvern.cli.status import status
from kvern.cli.tokenize import tokenize
from kvern.cli.up import up
from kvern.client import KvernError, Unreachable
from kvern.version import __version__

EXIT_FAILED = 1
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="kvern")
def kvern() -> None:
    """Serve large language models, and talk to them.

    Exit codes: 0 well, 1 failed, 2 wrong usage, 3 no Kvern reached, 130 Ctrl-C.
    """


for _command in (
    *(up, run, chat, generate, tokenize, models, route, status, logs),
    *(drain, reset_cache, keys, download, capacity, doctor),
):
    kvern.add_command(_command)


def main() -> NoReturn:
    """Run the command and exit."""
    sys.exit(_run())


def _run() -> int:
    try:
        return kvern.main(standalone_mode=False) or 0
    except click.Abort:
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except Unreachable as error:
        return _fail(f"{error.message}; start one with: kvern up", EXIT_UNREACHABLE)
    except KvernError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # Whoever read our output is gone. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _fail(message: str, exit_code: int = EXIT_FAILED) -> int:
    click.echo(f"Error: {message}", err=True)
    return exit_code
