"""Where the time of a decode step goes, with the real engine, by its own account.

    python bench/step.py [MODEL] [--batch N] [--context N] [--sampled] [--dtype bfloat16] [--profile] [--json]

N requests with random prompts decode together until enough steps were measured. The first ones are left out. With
--profile the model's parts are timed as well, one call at a time, which makes the step somewhat longer: by some
microseconds each of 270 operations, which are otherwise one program.
"""

from __future__ import annotations

import kvern.services.engine  # isort: skip  # noqa: F401  # before anything imports torch: it decides on its threads

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any
from unittest.mock import patch

import click
from rich.console import Console
from rich.table import Table
from torch import nn

from kvern.engine.config import EngineConfig
from kvern.engine.core import Add, Output, Stop
from kvern.engine.model.causal_lm import CausalLM
from kvern.engine.model.layers import Linear
from kvern.engine.model.loader import load_model
from kvern.engine.model.ops import LayerOps, choose_ops
from kvern.engine.plan import StepStats, StepTimes
from kvern.engine.request import Request, SamplingParams, StoppingParams
from kvern.engine.startup import Engine, build_engine
from kvern.kernels.cpu import Operation
from kvern.kernels.cpu_program import Program
from kvern.kernels.paged_attention import paged_attention
from kvern.services.runtime.model_source import DEFAULT_MODEL, find_model

NUM_WARM_UP_STEPS = 10
PHASES = tuple(field.name.removesuffix("_ns") for field in fields(StepTimes))
_COMPUTED = ("forward", "sample")

LINEAR, NORMS, ROTATION, ATTENTION, ACTIVATION = "linear layers", "norms", "rotary and KV", "attention", "activation"


@dataclass(frozen=True)
class StepCost:
    """Medians over steps."""

    batch: int
    context: int
    steps: int
    step_ms: float
    fractions: dict[str, float]
    """Of each phase, of all steps together."""
    overhead: float
    """Share of a step that is neither forward nor sampling."""
    parts_ms: dict[str, float]
    """What the model's parts take of a step, in milliseconds, where that was asked for."""


class Parts:
    """The time that parts of a model take, step by step."""

    def __init__(self) -> None:
        self._step_ns: Counter[str] = Counter()
        self._steps_ns: list[Counter[str]] = []

    def end_step(self, *, counts: bool) -> None:
        if counts:
            self._steps_ns.append(self._step_ns)
        self._step_ns = Counter()

    def medians_ms(self) -> dict[str, float]:
        names = dict.fromkeys(name for step in self._steps_ns for name in step)
        return {name: statistics.median(step[name] for step in self._steps_ns) / 1e6 for name in names}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started_ns = time.perf_counter_ns()
            try:
                return function(*arguments, **options)
            finally:
                self._step_ns[name] += time.perf_counter_ns() - started_ns

        return call

    @contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:
        """Time a model's parts from here on, in an engine that is built from here on."""
        assert isinstance(module, CausalLM), "transformers' own models have other parts"
        for name, layer in module.named_modules():
            if isinstance(layer, Linear):
                layer.forward = self.timed("head" if name == "lm_head" else LINEAR, layer.forward)  # type: ignore[method-assign]
        attention = self.timed(ATTENTION, paged_attention)
        with (
            patch("kvern.engine.model.attention.paged_attention", attention),
            patch("kvern.engine.runner.choose_ops", self._timed_ops),
            patch("kvern.engine.model.cpu_decoder.Program", partial(TimedProgram, self)),
        ):
            yield

    def _timed_ops(self, *arguments: Any, **options: Any) -> LayerOps:
        ops = copy(choose_ops(*arguments, **options))
        operations = {"norm": NORMS, "add_norm": NORMS, "rotate_and_store": ROTATION, "gate": ACTIVATION}
        for operation, name in operations.items():
            setattr(ops, operation, self.timed(name, getattr(ops, operation)))
        return ops


class TimedProgram:
    """In place of a program: its operations, each a program of its own, some microseconds longer by that."""

    def __init__(self, parts: Parts, operations: Sequence[Operation]) -> None:
        self._runs = [parts.timed(_part(operation), Program([operation]).run) for operation in operations]

    def run(self, num_threads: int, symbols: Mapping[str, int]) -> None:
        for run in self._runs:
            run(num_threads, symbols)


def _part(operation: Operation) -> str:
    name = operation.kernel.__name__
    if "multiply" in name:
        return LINEAR
    return {"_norm": NORMS, "_rotate": ROTATION, "_silu": ACTIVATION, "_gelu": ACTIVATION}.get(name, ATTENTION)


class Measurement:
    """Runs an engine's loop on this thread and keeps what it says of the steps that are decodes of the whole batch."""

    def __init__(self, engine: Engine, batch: int, num_steps: int, parts: Parts) -> None:
        self._engine, self._batch, self._num_steps, self._parts = engine, batch, num_steps, parts
        self._num_decodes = 0
        self.steps: list[StepStats] = []

    def run(self, context: int, sampling: SamplingParams) -> None:
        for number in range(self._batch):
            self._engine.core.send(Add(self._request(number, context, sampling)))
        self._engine.core.run(self._take)

    def _request(self, number: int, context: int, sampling: SamplingParams) -> Request:
        """Return one whose context is `context` tokens halfway through the measured steps."""
        length = max(1, context - NUM_WARM_UP_STEPS - self._num_steps // 2)
        prompt = random.Random(number).choices(range(self._engine.vocab_size), k=length)
        stopping = StoppingParams(self._engine.capacity.max_model_len - length, ignore_eos=True)
        return Request(number, prompt, length, sampling, stopping, arrival=number)

    def _take(self, output: Output) -> None:
        step = getattr(output, "step", None)
        if step is None:
            return
        is_decode = step.num_tokens == step.num_seqs == self._batch
        self._num_decodes += is_decode
        counts = is_decode and self._num_decodes > NUM_WARM_UP_STEPS
        self._parts.end_step(counts=counts)
        if counts:
            self.steps.append(step)
        if len(self.steps) == self._num_steps:
            self._engine.core.send(Stop())


def measure(
    engine: Engine, batch: int, context: int, num_steps: int, sampling: SamplingParams, parts: Parts
) -> StepCost:
    """Measure a started engine, once."""
    measurement = Measurement(engine, batch, num_steps, parts)
    measurement.run(context, sampling)
    taken_ns = {phase: sum(getattr(step.times, f"{phase}_ns") for step in measurement.steps) for phase in PHASES}
    total_ns = sum(taken_ns.values())
    fractions = {phase: taken / total_ns for phase, taken in taken_ns.items()}
    return StepCost(
        batch=batch,
        context=context,
        steps=num_steps,
        step_ms=statistics.median(step.seconds for step in measurement.steps) * 1e3,
        fractions=fractions,
        overhead=1 - sum(fractions[phase] for phase in _COMPUTED),
        parts_ms=parts.medians_ms(),
    )


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--batch", default=64, show_default=True, help="Requests that decode together.")
@click.option("--context", default=100, show_default=True, help="Tokens a request has, halfway through.")
@click.option("--steps", default=100, show_default=True, help="Steps to measure.")
@click.option("--sampled", is_flag=True, help="Draw tokens at temperature 1, rather than take the likeliest.")
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--quantization", default=None)
@click.option("--profile", is_flag=True, help="Time the model's parts too.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def main(
    model: str,
    batch: int,
    context: int,
    steps: int,
    sampled: bool,
    dtype: str,
    quantization: str | None,
    profile: bool,
    as_json: bool,
) -> None:
    """Measure one batch size."""
    longest = context + steps + NUM_WARM_UP_STEPS + batch  # the first ones decode while the last ones are prefilled
    config = EngineConfig(
        find_model(model).path,
        dtype=dtype,
        quantization=quantization,
        max_num_seqs=batch,
        max_model_len=longest,
        num_blocks=batch * (longest // 16 + 1),
    )
    loaded, parts = load_model(config), Parts()
    with parts.of(loaded.module) if profile else nullcontext():
        engine = build_engine(loaded, config)
        cost = measure(engine, batch, context, steps, SamplingParams(temperature=1.0 if sampled else 0.0), parts)
    print(json.dumps(asdict(cost))) if as_json else Console().print(_table(cost))


def _table(cost: StepCost) -> Table:
    table = Table(title=f"batch {cost.batch}, {cost.context} tokens each: {cost.step_ms:.2f} ms a step")
    table.add_column("")
    table.add_column("ms", justify="right")
    table.add_column("%", justify="right")
    for phase, fraction in cost.fractions.items():
        table.add_row(phase, f"{cost.step_ms * fraction:.2f}", f"{100 * fraction:.1f}")
    for name, taken_ms in cost.parts_ms.items():
        table.add_row(f"  {name}", f"{taken_ms:.2f}", f"{100 * taken_ms / cost.step_ms:.1f}")
    return table


if __name__ == "__main__":
    main()
