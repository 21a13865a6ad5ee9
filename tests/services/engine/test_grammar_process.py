"""Constraints that would keep the grammar library busy for hours or overflow its stack, in real processes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from kvern.engine.errors import RequestRefused
from kvern.engine.startup import Engine
from kvern.services.engine import grammars as grammars_module
from kvern.services.engine.grammar_trials import GrammarTrials
from kvern.services.engine.grammars import Grammars
from kvern.services.runtime.bounded_process import Message
from kvern.services.runtime.bounded_work import BoundedWork
from kvern.services.runtime.model_source import find_model
from kvern.v1.inference_pb2 import Choices, Constraint

pytestmark = pytest.mark.asyncio(loop_scope="module")


def _chain(rule: str, num_rules: int, *, body: str) -> str:
    """Return a grammar whose rules each refer to the next."""
    rules = (f"{rule}{number}: " + body.format(f"{rule}{number + 1}") for number in range(num_rules))
    return "\n".join([f"start: {rule}0", *rules, f'{rule}{num_rules}: "x"'])


def _references(num_schemas: int) -> str:
    schemas: dict[str, Any] = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(num_schemas)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**schemas, f"a{num_schemas}": {"type": "string"}}})


BOMBS = {
    "hours": Constraint(grammar=_chain("A", 1000, body="{0} {0}")),
    "stack": Constraint(grammar=_chain("a", 15_000, body="{0} {0}")),
    "references": Constraint(json_schema=_references(6000)),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grammars() -> AsyncIterator[Grammars]:
    engine = SimpleNamespace(vocab_size=49152, eos_token_ids=[0])
    with pytest.MonkeyPatch.context() as patch:
        # Trials run when nobody else wants to: where tests keep all cores busy, they take ten times as long.
        patch.setattr(grammars_module, "_COMPILE_TIMEOUT_S", 240.0)
        grammars = Grammars(find_model("smollm2"), cast(Engine, engine))
        yield grammars
        await grammars.close()


async def test_bombs_are_refused_and_the_next_constraints_are_not(grammars: Grammars) -> None:
    """A library that crashes takes no engine with it."""
    bombs = asyncio.gather(*map(grammars.compile, BOMBS.values()), return_exceptions=True)
    good = Constraint(choices=Choices(values=["yes", "no"]))
    assert await grammars.compile(good) is await grammars.compile(good)
    for field, ended in zip(("grammar", "grammar", "json_schema"), await bombs, strict=True):
        assert isinstance(ended, RequestRefused)
        assert (ended.field, str(ended)) == (f"constraint.{field}", "cannot be compiled: too much work")
    with pytest.raises(RequestRefused, match="cannot be compiled: at 1"):
        await grammars.compile(Constraint(regex="("))
    await grammars.compile(Constraint(json_object=True))


async def test_grammar_may_name_the_models_tokens_and_no_others(grammars: Grammars) -> None:
    for named in ("<|im_start|>", "<[49151]>", "<[300-400]>"):
        await grammars.compile(Constraint(grammar=f'start: {named} "x"'))
    for unknown in ("<|unknown|>", "<[49152]>"):
        with pytest.raises(RequestRefused, match="cannot be compiled: at 1"):
            await grammars.compile(Constraint(grammar=f'start: {unknown} "x"'))


async def trials_of(grammars: Grammars) -> GrammarTrials:
    loaded = await grammars._loading
    assert loaded is not None
    return loaded.trials


class CountedTrials:
    """Counts the trials that it has made by real ones."""

    def __init__(self, work: BoundedWork) -> None:
        self.num_begun = self.num_running = self.most = 0
        self.begun = asyncio.Event()
        self._work = work
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()

    def ask(self, job: Message, *, cpu_s: float) -> Message | None:
        with self._lock:
            self.num_begun += 1
            self.num_running += 1
            self.most = max(self.most, self.num_running)
        self._loop.call_soon_threadsafe(self.begun.set)
        try:
            return self._work.ask(job, cpu_s=cpu_s)
        finally:
            with self._lock:
                self.num_running -= 1


@pytest_asyncio.fixture(loop_scope="module")
async def trials(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> CountedTrials:
    of_grammars = await trials_of(grammars)
    counted = CountedTrials(of_grammars.work)
    monkeypatch.setattr(of_grammars, "work", counted)
    return counted


async def test_slow_constraints_wait_for_each_other_and_hardly_anybody_for_them(grammars: Grammars) -> None:
    slow = [Constraint(grammar=_chain("A", 1000 + number, body="{0} {0}")) for number in range(6)]
    waiting = [asyncio.create_task(grammars.compile(each)) for each in slow]
    await asyncio.sleep(0)
    await grammars.compile(Constraint(regex="quick"))
    assert sum(task.done() for task in waiting) < len(slow) / 2
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_trial_whose_request_was_aborted_has_its_place_until_it_ends(
    grammars: Grammars, trials: CountedTrials
) -> None:
    """Nobody gets more of the machine by aborting."""
    aborted = asyncio.create_task(grammars.compile(Constraint(grammar=_chain("A", 900, body="{0} {0}"))))
    await trials.begun.wait()
    aborted.cancel()
    await grammars.compile(Constraint(regex="a+"))
    assert (trials.num_begun, trials.most) == (2, 1)


async def test_constraint_that_many_ask_for_at_once_is_tried_once(grammars: Grammars, trials: CountedTrials) -> None:
    schema = Constraint(json_schema='{"type": "object", "properties": {"mill": {"type": "string"}}}')
    compiled = await asyncio.gather(*(grammars.compile(schema) for _ in range(20)))
    assert len(set(map(id, compiled))) == 1
    assert trials.num_begun == 1


async def test_constraint_that_nothing_can_try_is_refused_alone(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is raised otherwise ends everybody's requests."""
    monkeypatch.setattr(await trials_of(grammars), "work", BoundedWork("kvern.services.engine.no_process"))
    with pytest.raises(RequestRefused, match="no process could be started"):
        await grammars.compile(Constraint(regex="b+"))
