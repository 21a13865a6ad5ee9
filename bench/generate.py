"""How fast a set answers: tokens a second, and first-token and inter-token latencies, at several concurrencies.

    python bench/generate.py smollm2 [--json] [-- FLAGS OF KVERN UP]

It starts a set of its own with `kvern up` on free ports and goes through the front door, as clients do. Prompts are
random token ids, each different, so that nothing is found in the prefix cache; answers have a fixed length.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING

import click
import grpc
from rich import box
from rich.console import Console
from rich.table import Table

from kvern.v1 import inference_pb2 as pb
from kvern.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from kvern.v1.inference_pb2_grpc import InferenceServiceAsyncStub

KVERN = str(Path(sys.executable).with_name("kvern"))
PERCENTILES = (50, 90, 99)
MIN_REQUESTS = 4


@dataclass(frozen=True)
class Workload:
    """What every request asks for."""

    prompt_tokens: int
    output_tokens: int

    def request(self, vocab_size: int, rng: random.Random) -> pb.GenerateRequest:
        ids = [rng.randrange(vocab_size) for _ in range(self.prompt_tokens)]
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=ids),
            sampling=pb.Sampling(temperature=0),
            stopping=pb.Stopping(max_tokens=self.output_tokens, ignore_eos=True),
            output=pb.Output(token_ids=True),
        )


@dataclass(frozen=True)
class Answer:
    """Times of one request, in seconds."""

    first_token_s: float
    inter_token_s: list[float]
    """One a token after the first. Tokens that came in one message share its gap equally."""


@dataclass(frozen=True)
class Level:
    """Result at one concurrency. Percentiles are those of PERCENTILES, in milliseconds."""

    concurrency: int
    num_requests: int
    total_s: float
    output_tokens_per_s: float
    first_token_ms: list[float]
    inter_token_ms: list[float]


async def answer(stub: InferenceServiceAsyncStub, request: pb.GenerateRequest) -> Answer:
    """Run one request to its end."""
    start = last = time.perf_counter()
    first_token_s, gaps = 0.0, list[float]()
    async for event in stub.Generate(request):
        count = len(event.delta.token_ids)
        if count == 0:
            continue
        now = time.perf_counter()
        if first_token_s == 0.0:
            first_token_s, count = now - start, count - 1
        gaps += [(now - last) / count] * count if count else []
        last = now
    return Answer(first_token_s, gaps)


async def measure(address: str, concurrency: int, requests: Sequence[pb.GenerateRequest]) -> list[Answer]:
    """Run all requests, `concurrency` at a time."""
    places = asyncio.Semaphore(concurrency)

    async with grpc.aio.insecure_channel(address) as channel:
        stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)

        async def one(request: pb.GenerateRequest) -> Answer:
            async with places:
                return await answer(stub, request)

        return await asyncio.gather(*(one(request) for request in requests))


def run_level(address: str, concurrency: int, workload: Workload, vocab_size: int) -> Level:
    click.echo(f"measuring at concurrency {concurrency}", err=True)
    rng = random.Random(concurrency)
    count = max(MIN_REQUESTS, concurrency)
    requests = [workload.request(vocab_size, rng) for _ in range(count)]
    start = time.perf_counter()
    answers = asyncio.run(measure(address, concurrency, requests))
    total_s = time.perf_counter() - start
    return Level(
        concurrency=concurrency,
        num_requests=count,
        total_s=total_s,
        output_tokens_per_s=sum(1 + len(each.inter_token_s) for each in answers) / total_s,
        first_token_ms=percentiles_ms([each.first_token_s for each in answers]),
        inter_token_ms=percentiles_ms([gap for each in answers for gap in each.inter_token_s]),
    )


def percentiles_ms(values_s: Sequence[float]) -> list[float]:
    cuts = quantiles(values_s, n=100, method="inclusive")
    return [cuts[percentile - 1] * 1000 for percentile in PERCENTILES]


@contextmanager
def served(model: str, flags: Sequence[str]) -> Iterator[str]:
    """Start a set, yield its gRPC address, stop it."""
    command = [KVERN, "up", model, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield wait_for_address(process)
        finally:
            process.terminate()


def wait_for_address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[:1] == ["gRPC"]:
            return line.split()[1]
    sys.exit(f"kvern up ended with status {process.wait()}")


def vocabulary_size(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        return int(InferenceServiceStub(channel).ListModels(pb.ListModelsRequest()).models[0].vocab_size)


def print_table(levels: Sequence[Level], title: str) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    spread = " / ".join(f"p{percentile}" for percentile in PERCENTILES)
    for name in ("clients", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("first token, ms", "inter-token, ms"):
        table.add_column(f"{name}\n{spread}", justify="right", no_wrap=True)
    for level in levels:
        latencies = (" / ".join(f"{ms:,.0f}" for ms in each) for each in (level.first_token_ms, level.inter_token_ms))
        table.add_row(str(level.concurrency), f"{level.output_tokens_per_s:,.1f}", *latencies)
    Console().print(table)


@click.command()
@click.argument("model", default="smollm2")
@click.argument("up_flags", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1, 16, 64),
    show_default=True,
    help="May be repeated.",
)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--output-tokens", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of a table.")
def main(
    model: str,
    up_flags: Sequence[str],
    concurrency: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
    as_json: bool,
) -> None:
    """Measure MODEL through the front door of a set started for it. UP_FLAGS, after --, go to kvern up."""
    workload = Workload(prompt_tokens, output_tokens)
    with served(model, up_flags) as address:
        vocab_size = vocabulary_size(address)
        asyncio.run(measure(address, 1, [workload.request(vocab_size, random.Random("warm-up"))]))
        levels = [run_level(address, clients, workload, vocab_size) for clients in concurrency]
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    if as_json:
        print(json.dumps({"model": model, "machine": machine, **asdict(workload), "levels": [*map(asdict, levels)]}))
    else:
        print_table(levels, f"{model} on {machine}: prompts of {prompt_tokens}, answers of {output_tokens} tokens")


if __name__ == "__main__":
    main()
