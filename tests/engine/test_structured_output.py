"""Constrained requests in a real engine: what ends by itself is valid, and nobody else is moved."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from kvern.engine.config import EngineConfig
from kvern.engine.constraint import Constraint, ConstraintKind
from kvern.engine.grammar import Grammar, GrammarCompiler
from kvern.engine.model.loader import LoadedModel, load_model
from kvern.engine.request import FinishReason, SamplingParams
from kvern.engine.startup import build_engine
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import Tokenizer, load_tokenizer

from .engine_harness import EngineHarness, Outcome
from .json_schemas import make_schemas

NUM_SCHEMAS = 200
PROMPT = "<|im_start|>user\nAnswer in JSON.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> LoadedModel:
    return load_model(EngineConfig(smollm2_path, dtype="float32"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(find_model("smollm2"))


@pytest.fixture(scope="module")
def compiler(model: LoadedModel, tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.backend.to_str(), model.config.vocab_size, model.eos_token_ids)


def harness(model: LoadedModel, **options: object) -> EngineHarness:
    settings = {"num_blocks": 1024, "max_model_len": 256} | options
    return EngineHarness(build_engine(model, EngineConfig(model_path=Path("unread"), **settings)))  # type: ignore[arg-type]


def compile_schema(compiler: GrammarCompiler, schema: object) -> Grammar:
    return compiler.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))).result()


def text_of(outcome: Outcome, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(outcome.token_ids, skip_special_tokens=True)


def test_outputs_of_200_schemas_that_end_by_themselves_validate(
    model: LoadedModel, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    engine = harness(model, max_num_seqs=64)
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False)
    schemas = make_schemas(NUM_SCHEMAS)
    outcomes = [
        engine.add(prompt, 40, SamplingParams(1.0, seed=number), grammar=compile_schema(compiler, schema).start())
        for number, schema in enumerate(schemas)
    ]
    engine.run()
    reasons = [outcome.ended.reason for outcome in outcomes if outcome.ended is not None]
    assert reasons.count(FinishReason.STOP) > 0.8 * NUM_SCHEMAS
    assert reasons.count(FinishReason.STOP) + reasons.count(FinishReason.LENGTH) == NUM_SCHEMAS
    for schema, outcome, reason in zip(schemas, outcomes, reasons, strict=True):
        if reason is FinishReason.STOP:
            value = json.loads(text_of(outcome, tokenizer))
            jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
