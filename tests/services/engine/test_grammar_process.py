"""Constraints that would keep the grammar library busy for hours or overflow its stack, in real processes."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvern.engine.errors import RequestRefused
from kvern.engine.startup import Engine
from kvern.services.engine.grammars import Grammars
from kvern.services.runtime.model_source import find_model
from kvern.v1.inference_pb2 import Choices, Constraint


def _chain(rule: str, num_rules: int, *, body: str) -> str:
    """Return a grammar whose rules each refer to the next."""
    rules = (f"{rule}{number}: " + body.format(f"{rule}{number + 1}") for number in range(num_rules))
    return "\n".join([f"start: {rule}0", *rules, f'{rule}{num_rules}: "x"'])


def _references(num_schemas: int) -> str:
    schemas: dict[str, Any] = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(num_schemas)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**schemas, f"a{num_schemas}": {"type": "string"}}})


BOMBS = {
    "hours": Constraint(grammar=_chain("A", 2000, body="{0} {0}")),
    "stack": Constraint(grammar=_chain("a", 15_000, body="{0} {0}")),
    "references": Constraint(json_schema=_references(6000)),
}


@pytest.fixture
async def grammars() -> Grammars:
    engine = SimpleNamespace(vocab_size=49152, eos_token_ids=[0])
    return Grammars(find_model("smollm2"), cast(Engine, engine))


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
    await grammars.close()
