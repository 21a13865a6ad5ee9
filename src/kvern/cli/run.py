"""`kvern run`: up, answer, down."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import grpc

from kvern.cli.answer import print_answer
from kvern.cli.chat import Conversation, converse
from kvern.cli.options import api_key_from, api_key_option
from kvern.cli.output import stderr_console
from kvern.cli.ready import print_ready
from kvern.cli.set_command import Progress, SetCommand, address_option, local_set, replicas_option
from kvern.client import Client, GenerateOptions
from kvern.supervisor.addresses import Address
from kvern.supervisor.stop import StopRequest
from kvern.v1.tokenizer_pb2 import GetTokenizerInfoRequest
from kvern.v1.tokenizer_pb2_grpc import TokenizerServiceStub

if TYPE_CHECKING:
    from kvern.supervisor.local_set import LocalSet

_FREE_PORT = Address("127.0.0.1", 0)
_SERVE_LISTEN = Address("127.0.0.1", 50051)
_SERVE_HTTP = Address("127.0.0.1", 8000)
_POLL_S = 0.05
_MAX_TOKENS = 512


@click.command(cls=SetCommand)
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--serve", is_flag=True, help="Go on serving after the answer, until Ctrl-C, at the ports of kvern up.")
@address_option("--listen", "Where clients connect. [default: a free port]")
@address_option("--http", "Where the HTTP API is. [default: a free port]")
@replicas_option
@click.option(
    "--max-tokens", type=click.IntRange(min=1), help="Most tokens to generate. [default: 512, at most half the context]"
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 always takes the likeliest token.")
@api_key_option
def run(
    model: str,
    prompt: str | None,
    serve: bool,
    listen: Address | None,
    http: Address | None,
    replicas: int,
    max_tokens: int | None,
    temperature: float,
    api_key_file: Path | None,
    **settings: str | bool | None,
) -> None:
    """Start all services with MODEL, answer PROMPT, stop them. Without PROMPT, hold a conversation."""
    listen = listen or (_SERVE_LISTEN if serve else _FREE_PORT)
    http = http or (_SERVE_HTTP if serve else _FREE_PORT)
    with local_set(model, listen, http, replicas, settings) as running, _in_background(running) as served:
        with Client(running.router, api_key=api_key_from(api_key_file)) as client:
            options: GenerateOptions = {"max_tokens": max_tokens or _room(client), "temperature": temperature}
            _answer(client, running, prompt, options)
        if serve:
            print_ready(running, stderr_console())
            _serve_until_interrupted(served)


def _room(client: Client) -> int:
    """Return how long answers may be where nobody said: long enough for one, and no small context filled by it."""
    return min(_MAX_TOKENS, client.list_models().models[0].max_context // 2)


def _answer(client: Client, running: LocalSet, prompt: str | None, options: GenerateOptions) -> None:
    if prompt is None:
        converse(Conversation(client, options))
    elif _has_chat_template(running.sockets / "tokenizer.sock"):
        Conversation(client, options).say(prompt)
    else:
        print_answer(client.generate(prompt, **options))


def _has_chat_template(tokenizer: Path) -> bool:
    with grpc.insecure_channel(f"unix:{tokenizer}") as channel:
        response = TokenizerServiceStub(channel).GetTokenizerInfo(GetTokenizerInfoRequest())
    return response.tokenizers[0].has_chat_template


@contextmanager
def _in_background(running: LocalSet) -> Iterator[Future[None]]:
    """Serve a set in another thread, so that Ctrl-C in this one ends what this one does. Drained on every way out."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    stop = StopRequest()
    with Progress(stderr_console(), on_ready=lambda: None) as progress, ThreadPoolExecutor(1) as thread:
        served = thread.submit(running.run, stop, progress)
        try:
            while not progress.is_ready:
                _raise_if_ended(served)
                time.sleep(_POLL_S)
            yield served
        finally:
            stop.requested = True
            _wait_drained(served, stop)


def _raise_if_ended(served: Future[None]) -> None:
    if served.done():
        served.result()


def _serve_until_interrupted(served: Future[None]) -> None:
    try:
        served.result()
    except KeyboardInterrupt:
        return


def _wait_drained(served: Future[None], stop: StopRequest) -> None:
    while not served.done():
        try:
            time.sleep(_POLL_S)
        except KeyboardInterrupt:
            stop.forced = True
