"""How often a router knows how much of a prompt its replica has cached: predicted against actual cached tokens.

    python bench/prediction.py [MODEL] [--requests 1000] [--json] [-- FLAGS OF KVERN UP]

It starts a set with several replicas and holds many conversations at once, more than the replicas' KV memory has room
for: so while they grow, blocks of others are evicted. Prompts are random token ids; some conversations begin alike.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click
import grpc
from generate import served
from rich import box
from rich.console import Console
from rich.table import Table

from kvern.v1 import inference_pb2 as pb
from kvern.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from kvern.v1.inference_pb2_grpc import InferenceServiceAsyncStub

NUM_SYSTEM_PROMPTS = 4
SYSTEM_TOKENS = 64
TURN_TOKENS = (16, 64)
OUTPUT_TOKENS = 8
MAX_PROMPT_TOKENS = 400
"""A conversation that is longer begins anew."""

PAUSE_S = 0.2
"""Between an answer and its conversation's next prompt, at least: people read what they asked for."""

UP_FLAGS = ("--num-blocks=480", "--max-model-len=512")


@dataclass(frozen=True)
class Outcome:
    """One request."""

    replica: str
    prompt_tokens: int
    predicted: int
    """Cached tokens that the router counted on when it chose."""
    cached: int
    asked_before: int
    """Tokens of the prompt that an earlier request of the conversation had already computed."""


@dataclass
class Conversation:
    """A prompt that grows."""

    system: list[int]
    token_ids: list[int] = field(default_factory=list)
    asked_before: int = 0

    def ask(self, vocab_size: int, rng: random.Random) -> None:
        """Add what its user says next."""
        turn = [rng.randrange(vocab_size) for _ in range(rng.randint(*TURN_TOKENS))]
        self.asked_before = len(self.token_ids)
        if not self.token_ids or len(self.token_ids) + len(turn) > MAX_PROMPT_TOKENS:
            self.token_ids, self.asked_before = list(self.system), 0
        self.token_ids += turn


async def run_turn(stub: InferenceServiceAsyncStub, conversation: Conversation) -> Outcome:
    """Send a conversation's prompt and add the answer to it."""
    prompt_tokens, cached = len(conversation.token_ids), 0
    call = stub.Generate(
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=conversation.token_ids),
            sampling=pb.Sampling(temperature=0),
            stopping=pb.Stopping(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
            output=pb.Output(token_ids=True),
        )
    )
    async for event in call:
        if event.HasField("scheduled"):
            cached = event.scheduled.cached_tokens
        conversation.token_ids += event.delta.token_ids
    told = dict(await call.trailing_metadata())
    replica, predicted = str(told["kvern-replica"]), int(told["kvern-matched-tokens"])
    return Outcome(replica, prompt_tokens, predicted, cached, conversation.asked_before)


async def converse(
    address: str, vocab_size: int, num_requests: int, num_conversations: int, concurrency: int
) -> list[Outcome]:
    """Let conversations take turns at random, `concurrency` at a time."""
    rng = random.Random(0)
    systems = [[rng.randrange(vocab_size) for _ in range(SYSTEM_TOKENS)] for _ in range(NUM_SYSTEM_PROMPTS)]
    idle = [Conversation(rng.choice(systems)) for _ in range(num_conversations)]
    outcomes: list[Outcome] = []
    to_start = iter(range(num_requests))
    async with grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as pauses:
        stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)

        async def rest(conversation: Conversation) -> None:
            await asyncio.sleep(PAUSE_S)
            idle.append(conversation)

        async def client() -> None:
            for _ in to_start:
                conversation = idle.pop(rng.randrange(len(idle)))
                conversation.ask(vocab_size, rng)
                outcomes.append(await run_turn(stub, conversation))
                pauses.create_task(rest(conversation))

        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(client())
    return outcomes


def served_model(address: str) -> pb.Model:
    with grpc.insecure_channel(address) as channel:
        return InferenceServiceStub(channel).ListModels(pb.ListModelsRequest()).models[0]


@dataclass(frozen=True)
class Summary:
    requests: int
    predicted_exactly: int
    predicted_more: int
    """Requests that found less than predicted."""
    predicted_less: int
    hit_rate: float
    """Share of all prompt tokens that were cached."""
    num_forgotten: int
    """Requests that found less than their own conversation had computed before: it was evicted, or is elsewhere."""
    requests_by_replica: dict[str, int]


def summarize(outcomes: Sequence[Outcome], block_size: int) -> Summary:
    return Summary(
        requests=len(outcomes),
        predicted_exactly=sum(each.predicted == each.cached for each in outcomes),
        predicted_more=sum(each.predicted > each.cached for each in outcomes),
        predicted_less=sum(each.predicted < each.cached for each in outcomes),
        hit_rate=sum(each.cached for each in outcomes) / sum(each.prompt_tokens for each in outcomes),
        num_forgotten=sum(each.cached < each.asked_before - block_size for each in outcomes),
        requests_by_replica=dict(sorted(Counter(each.replica for each in outcomes).items())),
    )


def print_table(summary: Summary, title: str) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    share = summary.predicted_exactly / summary.requests
    counts = ", ".join(map(str, summary.requests_by_replica.values()))
    rows = (
        ("predicted exactly", f"{summary.predicted_exactly:,} of {summary.requests:,} ({share:.1%})"),
        ("predicted too much, too little", f"{summary.predicted_more:,}, {summary.predicted_less:,}"),
        ("prompt tokens cached", f"{summary.hit_rate:.1%}"),
        ("conversations found evicted", f"{summary.num_forgotten:,}"),
        ("requests by replica", counts),
    )
    for row in rows:
        table.add_row(*row)
    Console().print(table)


@click.command()
@click.argument("model", default="smollm2")
@click.argument("up_flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--requests", "num_requests", type=click.IntRange(min=1), default=1000, show_default=True)
@click.option("--replicas", type=click.IntRange(min=2), default=3, show_default=True)
@click.option("--conversations", type=click.IntRange(min=1), default=150, show_default=True)
@click.option("--concurrency", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of a table.")
def main(
    model: str,
    up_flags: Sequence[str],
    num_requests: int,
    replicas: int,
    conversations: int,
    concurrency: int,
    as_json: bool,
) -> None:
    """Compare what the router predicts with what replicas of MODEL find. UP_FLAGS, after --, go to kvern up."""
    with served(model, (f"--replicas={replicas}", *UP_FLAGS, *up_flags)) as address:
        info = served_model(address)
        outcomes = asyncio.run(converse(address, info.vocab_size, num_requests, conversations, concurrency))
    summary = summarize(outcomes, info.block_size)
    if as_json:
        print(json.dumps({"model": model, "replicas": replicas, **vars(summary)}))
    else:
        print_table(summary, f"{model}, {replicas} replicas")


if __name__ == "__main__":
    main()
