"""Compiling what requests constrain their output by, beside the event loop and the engine."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import NamedTuple

import structlog

from kvern.engine.constraint import Constraint, ConstraintKind
from kvern.engine.errors import RequestRefused
from kvern.engine.grammar import Grammar, GrammarCompiler
from kvern.engine.startup import Engine
from kvern.services.engine.grammar_trials import GrammarTrials
from kvern.services.runtime.errors import Unavailable
from kvern.services.runtime.model_source import ModelSource
from kvern.v1 import inference_pb2

_COMPILE_TIMEOUT_S = 30.0
"""From arrival, with the time that others' constraints take, which is bounded for each."""

_log = structlog.get_logger("kvern.engine")


class _Loaded(NamedTuple):
    """What the model's tokenizer is needed for."""

    compiler: GrammarCompiler
    trials: GrammarTrials


class Grammars:
    """Compiles constraints. The tokenizer that this needs is read once the engine serves: few requests wait for it."""

    def __init__(self, source: ModelSource, engine: Engine) -> None:
        self._loading = asyncio.create_task(self._load(source, engine))
        self._failure = ""

    async def compile(self, constraint: inference_pb2.Constraint) -> Grammar:
        """Return a constraint's grammar. Raises RequestRefused for one that cannot be compiled, or not in time."""
        wanted = to_constraint(constraint)
        try:
            async with asyncio.timeout(_COMPILE_TIMEOUT_S):
                loaded = await asyncio.shield(self._loading)
                if loaded is None:
                    raise RequestRefused("constraint", f"not possible with this model: {self._failure}")
                compiler, trials = loaded
                await _try(trials, compiler, wanted)
                # Others may wait for the same grammar.
                return await asyncio.shield(asyncio.wrap_future(compiler.compile(wanted)))
        except TimeoutError as error:
            raise RequestRefused(wanted.field, f"not compiled within {_COMPILE_TIMEOUT_S:g} s") from error

    async def close(self) -> None:
        """Compile nothing more."""
        if (loaded := await self._loading) is not None:
            loaded.compiler.close()

    async def _load(self, source: ModelSource, engine: Engine) -> _Loaded | None:
        try:
            return await asyncio.to_thread(_load_with, source, engine)
        except Exception as error:  # what the libraries raise on damaged files has no common base
            self._failure = str(error)
            _log.warning("requests with a constraint will be refused", model=str(source.path), reason=self._failure)
            return None


async def _try(trials: GrammarTrials, compiler: GrammarCompiler, wanted: Constraint) -> None:
    """See elsewhere whether a constraint can be compiled in bounds. Raises RequestRefused."""
    if not wanted.text or compiler.knows(wanted):
        return
    job = {"kind": wanted.kind.value, "text": wanted.text}
    try:
        answer = await trials.run(job, partial(compiler.knows, wanted))
    except (Unavailable, OSError) as error:
        raise RequestRefused(wanted.field, f"cannot be compiled: {error}") from error
    if answer is None:
        raise RequestRefused(wanted.field, "cannot be compiled: too much work")
    if answer:
        raise RequestRefused(answer["field"], answer["refused"])


def to_constraint(constraint: inference_pb2.Constraint) -> Constraint:
    """Raises RequestRefused where it has no kind."""
    name = constraint.WhichOneof("kind")
    if name is None:
        raise RequestRefused("constraint", "names no kind of constraint")
    kind = ConstraintKind(name)
    match kind:
        case ConstraintKind.JSON_OBJECT:
            return Constraint(kind)
        case ConstraintKind.CHOICES:
            return Constraint(kind, json.dumps(list(constraint.choices.values)))
    return Constraint(kind, getattr(constraint, name))


def _load_with(source: ModelSource, engine: Engine) -> _Loaded:
    # Imported here: it brings transformers' tokenizers, a second that no start should wait for.
    from kvern.services.runtime.text import load_tokenizer

    tokenizer_json = load_tokenizer(source).backend.to_str()
    compiler = GrammarCompiler(tokenizer_json, engine.vocab_size, engine.eos_token_ids)
    return _Loaded(compiler, GrammarTrials(tokenizer_json, engine.vocab_size))
