"""Grammars in whole steps of a small random model: when they are asked, and what else has a say."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from kvern.engine.config import EngineConfig
from kvern.engine.constraint import Constraint, ConstraintKind
from kvern.engine.core import Add, EngineCore, Output, Stop
from kvern.engine.grammar import GrammarCompiler
from kvern.engine.model.loader import LoadedModel
from kvern.engine.plan import NOTHING_ALLOWED, ChoiceEnded, StepResult
from kvern.engine.request import FinishReason, Request, SamplingParams, StoppingParams
from kvern.engine.startup import build_engine

from .small_vocabulary import EOS, TOKENS, make_tokenizer
from .tiny_llama import VOCAB_SIZE, load, save_tiny

REGEXES = ["[ab]{3,9}", "(true,){2}a", "x[0-9]*", r"\{\}", "[a-z]+( [a-z]+)*", "ab|abc"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path)
    return load(path)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(make_tokenizer().to_str(), VOCAB_SIZE, {EOS})


class Run:
    """Requests through a core of its own, until all have ended."""

    def __init__(self, model: LoadedModel, compiler: GrammarCompiler, *, depth: int = 0, num_blocks: int = 64) -> None:
        config = EngineConfig(Path("unread"), num_blocks=num_blocks, block_size=4, max_num_seqs=8, max_model_len=64)
        engine = build_engine(model, config)
        self._core = EngineCore(engine.scheduler, engine.runner, depth=depth)
        self._compiler = compiler
        self._num_requests = 0

    def add(self, regex: str | None, stopping: StoppingParams, sampling: SamplingParams | None = None) -> None:
        number = self._num_requests
        self._num_requests += 1
        grammar = None
        if regex is not None:
            grammar = self._compiler.compile(Constraint(ConstraintKind.REGEX, regex)).result().start()
        sampling = sampling or SamplingParams(seed=number)
        prompt = [5 + number] * (3 + number % 7)
        self._core.send(Add(Request(number, prompt, len(prompt), sampling, stopping, arrival=number, grammar=grammar)))

    def finish(self) -> tuple[dict[int, str], dict[int, ChoiceEnded]]:
        """Return each request's text, end tokens left out, and how it ended."""
        outputs: SimpleQueue[Output] = SimpleQueue()
        thread = threading.Thread(target=self._core.run, args=(outputs.put,))
        thread.start()
        texts: dict[int, str] = dict.fromkeys(range(self._num_requests), "")
        ended: dict[int, ChoiceEnded] = {}
        while len(ended) < self._num_requests:
            result = outputs.get(timeout=20)
            assert isinstance(result, StepResult)
            for number, token_id in zip(result.request_ids, result.token_ids, strict=True):
                texts[number] += "" if token_id == EOS else f"<{token_id}>"
            ended |= {end.request_id: end for end in result.ended}
        self._core.send(Stop())
        thread.join(timeout=10)
        return texts, ended


def plain(text: str) -> str:
    """Return the text that token ids in angle brackets stand for. Ids without a token stay."""
    token_ids = [int(part) for part in text.replace("<", "").split(">")[:-1]]
    known = [TOKENS[token_id] if token_id < len(TOKENS) else f"<{token_id}>" for token_id in token_ids]
    return "".join(known).replace("Ġ", " ")


def mixed(run: Run) -> Run:
    for number in range(24):
        regex = REGEXES[number % len(REGEXES)] if number % 4 else None
        run.add(regex, StoppingParams(6 + number % 11), SamplingParams(temperature=number % 3 / 2, seed=number))
    return run


def test_grammars_give_the_same_with_a_step_in_flight(model: LoadedModel, compiler: GrammarCompiler) -> None:
    """A grammar is asked once the token before is known, though the step was launched earlier."""
    at_once, ahead = (mixed(Run(model, compiler, depth=depth)).finish() for depth in (0, 1))
    assert at_once == ahead
    assert {end.reason for end in at_once[1].values()} == {FinishReason.STOP, FinishReason.LENGTH}


def test_preempted_grammars_go_on_where_they_were(model: LoadedModel, compiler: GrammarCompiler) -> None:
    roomy, tight = (mixed(Run(model, compiler, num_blocks=blocks, depth=1)).finish() for blocks in (64, 16))
    assert sum(end.preemptions for end in tight[1].values()) > 0
    assert tight[0] == roomy[0]


def test_request_without_a_grammar_is_unmoved_by_those_with_one(model: LoadedModel, compiler: GrammarCompiler) -> None:
    alone = Run(model, compiler)
    alone.add(None, StoppingParams(20, ignore_eos=True), SamplingParams(temperature=0))
    company = Run(model, compiler)
    company.add(None, StoppingParams(20, ignore_eos=True), SamplingParams(temperature=0))
    for regex in REGEXES:
        company.add(regex, StoppingParams(20))
    texts, ended = company.finish()
    assert texts[0] == alone.finish()[0][0]
    assert plain(texts[2]) == "true,true,a"
    assert ended[2].reason is FinishReason.STOP


@pytest.mark.parametrize("stopping", [StoppingParams(20, min_tokens=15), StoppingParams(20, ignore_eos=True)])
def test_grammar_that_allows_only_end_tokens_ends_where_they_are_otherwise_out(
    model: LoadedModel, compiler: GrammarCompiler, stopping: StoppingParams
) -> None:
    run = Run(model, compiler)
    run.add("ab|abc", stopping)
    texts, ended = run.finish()
    assert plain(texts[0]) == "abc"
    assert (ended[0].reason, ended[0].stop_token_id) == (FinishReason.STOP, EOS)


def test_grammar_at_odds_with_the_allowed_tokens_fails_that_request_alone(
    model: LoadedModel, compiler: GrammarCompiler
) -> None:
    run = Run(model, compiler)
    run.add("ab", StoppingParams(20), SamplingParams(allowed_token_ids=[TOKENS.index("c")]))
    run.add("ab", StoppingParams(20))
    texts, ended = run.finish()
    assert (ended[0].reason, ended[0].error_reason, texts[0]) == (FinishReason.ERROR, NOTHING_ALLOWED, "")
    assert (ended[1].reason, plain(texts[1])) == (FinishReason.STOP, "ab")
