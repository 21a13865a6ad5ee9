"""What the tokenizer's cache saves while a conversation grows: time to render and encode it, turn by turn.

python bench/encode.py [MODEL] [--json]
"""

from __future__ import annotations

import json
import os
import platform
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pydoc_data.topics import topics

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import Tokenizer, load_tokenizer
from kvern.services.tokenizer.prefix_cache import PrefixCache
from kvern.services.tokenizer.prompt import PromptEncoder
from kvern.v1 import inference_pb2, tokenizer_pb2

CACHE_BYTES = 128 * 1024 * 1024
WARM_UP_CHARS = 20_000
NUM_ROWS = 5


@dataclass(frozen=True)
class Turn:
    """One request: the conversation up to a user's message."""

    num_chars: int
    num_tokens: int
    whole_ms: float
    """Without a cache."""
    cached_ms: float


def conversations(num_turns: int, turn_chars: int, rng: random.Random) -> Iterator[inference_pb2.Chat]:
    """Yield a chat each time the user has spoken. Its messages are pieces of Python's manual."""
    text = "".join(topics.values())
    question_chars = turn_chars // 4
    chat = inference_pb2.Chat()
    for _ in range(num_turns):
        chat.messages.add(role="user", content=piece(text, question_chars, rng))
        yield chat
        chat.messages.add(role="assistant", content=piece(text, turn_chars - question_chars, rng))


def piece(text: str, num_chars: int, rng: random.Random) -> str:
    start = rng.randrange(len(text) - num_chars)
    return text[start : start + num_chars]


def timed(encoder: PromptEncoder, request: tokenizer_pb2.EncodePromptRequest) -> tuple[float, list[int]]:
    start = time.perf_counter()
    token_ids = encoder.encode(request).token_ids
    return (time.perf_counter() - start) * 1000, list(token_ids)


def measure(tokenizer: Tokenizer, num_turns: int, total_chars: int) -> list[Turn]:
    """Encode each turn of a conversation with a cache and without; the ids must be the same."""
    rng = random.Random(0)
    whole, cached = PromptEncoder(tokenizer, PrefixCache(0)), PromptEncoder(tokenizer, PrefixCache(CACHE_BYTES))
    for chat in conversations(1, WARM_UP_CHARS, rng):
        timed(whole, tokenizer_pb2.EncodePromptRequest(chat=chat))
    turns = []
    for chat in conversations(num_turns, total_chars // num_turns, rng):
        request = tokenizer_pb2.EncodePromptRequest(chat=chat)
        whole_ms, expected = timed(whole, request)
        cached_ms, token_ids = timed(cached, request)
        assert token_ids == expected
        num_chars = sum(len(message.content) for message in chat.messages)
        turns.append(Turn(num_chars, len(token_ids), whole_ms, cached_ms))
    return turns


def print_table(turns: Sequence[Turn], ratio: float, title: str) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("turn", "characters", "tokens", "whole, ms", "with the cache, ms"):
        table.add_column(name, justify="right")
    for number in sorted({max(1, len(turns) * row // NUM_ROWS) for row in range(NUM_ROWS + 1)}):
        turn = turns[number - 1]
        times = (f"{turn.whole_ms:.2f}", f"{turn.cached_ms:.2f}")
        table.add_row(str(number), f"{turn.num_chars:,}", f"{turn.num_tokens:,}", *times)
    Console().print(table)
    print(f"all turns together: {ratio:.1f} times as fast with the cache")


@click.command()
@click.argument("model", default="smollm2")
@click.option("--turns", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--chars", "total_chars", type=click.IntRange(min=1000), default=200_000, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of a table.")
def main(model: str, turns: int, total_chars: int, as_json: bool) -> None:
    """Measure a growing conversation in the chat template of MODEL. No weights are read."""
    measured = measure(load_tokenizer(find_model(model, weights=False)), turns, total_chars)
    ratio = sum(turn.whole_ms for turn in measured) / sum(turn.cached_ms for turn in measured)
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    if as_json:
        print(
            json.dumps({"model": model, "machine": machine, "cached_ratio": ratio, "turns": [*map(asdict, measured)]})
        )
    else:
        print_table(measured, ratio, f"{model} on {machine}: a conversation of {turns} turns")


if __name__ == "__main__":
    main()
