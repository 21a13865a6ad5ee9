"""Measure what a constraint costs: the delay of the first token, and the time of each step.

python bench/grammar.py [MODEL] [--json]
"""

from __future__ import annotations

import json
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import click
import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from kvern.engine.constraint import Constraint, ConstraintKind
from kvern.engine.grammar import Grammar, GrammarCompiler, MatcherState
from kvern.engine.logits_processors import TokenBitmask
from kvern.engine.sampler import sample
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import load_tokenizer

NUM_COMPILES = 20
MAX_STEPS = 40
BATCH_SIZES = (1, 16, 64)

_TEXT = {"type": "string", "maxLength": 40}
_PERSON = {
    "type": "object",
    "properties": {"name": _TEXT, "age": {"type": "integer", "minimum": 0}, "tags": {"type": "array", "items": _TEXT}},
    "required": ["name", "age"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "integer": {"type": "integer"},
    "any object": {"type": "object"},
    "person": _PERSON,
    "list of persons": {"$defs": {"person": _PERSON}, "type": "array", "items": {"$ref": "#/$defs/person"}},
    "100 properties": {
        "type": "object",
        "properties": {f"field_{number}": _TEXT for number in range(100)},
        "required": [f"field_{number}" for number in range(100)],
    },
    "enum of 1,000": {"enum": [f"value {number}" for number in range(1000)]},
}


@dataclass(frozen=True)
class SchemaCost:
    """Milliseconds that one schema costs. A first token waits for the first two."""

    name: str
    compile_ms: float
    first_mask_ms: float
    step_ms: float
    """Median of a step's mask and of taking in its token, together."""
    step_p99_ms: float


@dataclass(frozen=True)
class BatchCost:
    """Milliseconds a step that constraints in all of its rows cost, beside the sampler's own time."""

    num_rows: int
    fill_ms: float
    apply_ms: float
    sample_ms: float


def timed_ms(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1000


class Bench:
    """Measures on one vocabulary."""

    def __init__(self, model: str, eos_token_id: int = 0) -> None:
        tokenizer = load_tokenizer(find_model(model))
        self.vocab_size = tokenizer.vocab_size
        self._prefix = tokenizer.encode('{"name": "Ada', add_special_tokens=False)
        self._eos_token_id = eos_token_id
        self._compiler = GrammarCompiler(tokenizer.backend.to_str(), self.vocab_size, {eos_token_id})
        self._rng = random.Random(0)
        self._row = np.empty(-(-self.vocab_size // 32), dtype=np.int32)

    def schema_cost(self, name: str) -> SchemaCost:
        compiles, first_masks, steps = list[float](), list[float](), list[float]()
        for number in range(NUM_COMPILES):
            schema = {**SCHEMAS[name], "title": f"{name} {number}"}  # none is in the cache
            compiles.append(timed_ms(partial(self._compile, schema)))
            state = self._compile(schema).start()
            first_masks.append(timed_ms(partial(self._fill, state)))
            steps += self._walk(state)
        return SchemaCost(name, median(compiles), median(first_masks), median(steps), quantiles(steps, n=100)[98])

    def batch_cost(self, num_rows: int) -> BatchCost:
        """Measure rows that stand in a string, where most tokens are allowed."""
        states = [self._compile(_PERSON).start() for _ in range(num_rows)]
        for state in states:
            for token_id in self._prefix:
                state.advance(token_id)
        bits = np.empty((num_rows, len(self._row)), dtype=np.int32)
        logits = torch.randn(num_rows, self.vocab_size)

        def fill() -> None:
            for row, state in zip(bits, states, strict=True):
                state.fill(row, may_end=True)

        fill_ms = median(timed_ms(fill) for _ in range(10))
        mask = TokenBitmask(torch.arange(num_rows), torch.from_numpy(bits))
        apply_ms = median(timed_ms(lambda: mask.apply(logits)) for _ in range(10))
        return BatchCost(num_rows, fill_ms, apply_ms, median(timed_ms(lambda: sample(logits, None)) for _ in range(10)))

    def _compile(self, schema: dict[str, Any]) -> Grammar:
        return self._compiler.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))).result()

    def _fill(self, state: MatcherState) -> None:
        state.fill(self._row, may_end=True)

    def _step(self, state: MatcherState, token_id: int) -> None:
        state.advance(token_id)
        self._fill(state)

    def _walk(self, state: MatcherState) -> list[float]:
        """Draw tokens at random from what is allowed, and return the time of each step."""
        times: list[float] = []
        for _ in range(MAX_STEPS):
            allowed = np.flatnonzero(np.unpackbits(self._row.view(np.uint8), bitorder="little"))
            token_id = int(self._rng.choice(allowed))
            if token_id == self._eos_token_id:
                break
            times.append(timed_ms(partial(self._step, state, token_id)))
        return times


def print_tables(schemas: Sequence[SchemaCost], batches: Sequence[BatchCost], title: str) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("schema", "compile, ms", "first mask, ms", "a step, ms", "p99"):
        table.add_column(name, justify="left" if name == "schema" else "right")
    for each in schemas:
        costs = (each.compile_ms, each.first_mask_ms, each.step_ms, each.step_p99_ms)
        table.add_row(each.name, *(f"{ms:.3f}" for ms in costs))
    steps = Table(title="a step constrained in all rows", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rows", "masks, ms", "applied, ms", "greedy sampling, ms"):
        steps.add_column(name, justify="right")
    for batch in batches:
        steps.add_row(str(batch.num_rows), *(f"{ms:.2f}" for ms in (batch.fill_ms, batch.apply_ms, batch.sample_ms)))
    console = Console()
    console.print(table)
    console.print(steps)


@click.command()
@click.argument("model", default="smollm2")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of tables.")
def main(model: str, as_json: bool) -> None:
    """Measure constraints on the vocabulary of MODEL. No weights are read."""
    bench = Bench(model)
    schemas = [bench.schema_cost(name) for name in SCHEMAS]
    batches = [bench.batch_cost(num_rows) for num_rows in BATCH_SIZES]
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    if as_json:
        costs = {"schemas": [*map(asdict, schemas)], "batches": [*map(asdict, batches)]}
        print(json.dumps({"model": model, "machine": machine, "vocab_size": bench.vocab_size, **costs}))
    else:
        print_tables(schemas, batches, f"{model} on {machine}, {bench.vocab_size:,} tokens")


if __name__ == "__main__":
    main()
