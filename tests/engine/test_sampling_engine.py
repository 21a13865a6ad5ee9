"""Sampling in a whole engine on tiny random models: however the work is cut, cached and shared, the same output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from kvern.engine import runner
from kvern.engine.block_pool import BlockPool
from kvern.engine.config import EngineConfig
from kvern.engine.model.loader import LoadedModel
from kvern.engine.plan import NOTHING_ALLOWED, PromptLogprobs, SampledTokens, TokenLogprobs
from kvern.engine.request import FinishReason, Request, SamplingParams, StoppingParams
from kvern.engine.scheduler import Scheduler, SchedulerConfig
from kvern.engine.startup import build_engine
from kvern.services.engine.convert import choice_seed

from .engine_harness import GREEDY, EngineHarness, Outcome
from .tiny_llama import PROMPT, load, make_tiny, save_tiny

BLOCK_SIZE = 16

PENALIZED = SamplingParams(
    temperature=0.9, seed=17, min_p=0.01, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.3
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(reference: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("loaded")
    reference.save_pretrained(path)
    return load(path)


def harness(model: LoadedModel, **options: object) -> EngineHarness:
    settings = {"num_blocks": 256, "max_model_len": 256, "block_size": BLOCK_SIZE} | options
    return EngineHarness(build_engine(model, EngineConfig(model_path=Path("unread"), **settings)))  # type: ignore[arg-type]


def expected_logprobs(reference: LlamaForCausalLM, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(reference(torch.tensor([token_ids])).logits[0].float(), dim=-1)


def assert_logprobs_of(outcome: Outcome, reference: LlamaForCausalLM) -> None:
    """Within 1e-4 of transformers' log_softmax over the same tokens."""
    request = outcome.request
    expected = expected_logprobs(reference, request.token_ids)[request.num_prompt_tokens - 1 :]
    for row, token_id, told in zip(expected, outcome.token_ids, outcome.logprobs, strict=False):
        assert told is not None
        assert told.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert told.rank == int((row > row[token_id]).sum()) + 1
        assert list(told.top_ids) == row.topk(len(told.top_ids)).indices.tolist()


@pytest.mark.parametrize("penalty", [1.3, 1.5])
def test_greedy_tokens_with_repetition_penalty_equal_transformers(
    model: LoadedModel, reference: LlamaForCausalLM, penalty: float
) -> None:
    """D10, D11: cold, and from the cache."""
    prompt = PROMPT[: 2 * BLOCK_SIZE + 3]
    expected = reference.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=40, repetition_penalty=penalty, eos_token_id=None
    )[0, len(prompt) :].tolist()
    engine = harness(model)
    sampling = SamplingParams(0.0, repetition_penalty=penalty)
    cold, warm = engine.generate(prompt, 40, sampling), engine.generate(prompt, 40, sampling)
    assert warm.request.num_cached_tokens == 2 * BLOCK_SIZE
    assert cold.token_ids == warm.token_ids == expected


def test_frequency_penalty_ends_a_repetition(model: LoadedModel) -> None:
    """D08."""
    sampling = SamplingParams(0.0, logit_bias={40: 9.0})
    engine = harness(model)
    plain = engine.generate(PROMPT[:9], 30, sampling).token_ids
    penalized = engine.generate(PROMPT[:9], 30, replace(sampling, frequency_penalty=2.0)).token_ids
    assert plain.count(40) > 20
    assert penalized.count(40) < plain.count(40) / 2


def test_penalties_do_not_depend_on_chunks_cache_company_or_preemption(model: LoadedModel) -> None:
    prompts = [PROMPT[number : number + 40] for number in range(6)]
    alone = harness(model)
    expected = [alone.generate(prompt, 40, PENALIZED).token_ids for prompt in prompts]
    assert [alone.generate(prompt, 40, PENALIZED).token_ids for prompt in prompts] == expected
    crowded = harness(model, num_blocks=16, max_num_batched_tokens=11, max_num_seqs=8)
    outcomes = [crowded.add(prompt, 40, PENALIZED) for prompt in prompts]
    crowded.run()
    assert sum(outcome.request.num_preemptions for outcome in outcomes) > 0
    assert [outcome.token_ids for outcome in outcomes] == expected


def test_choices_equal_single_requests_with_their_seeds(model: LoadedModel) -> None:
    """D04: four choices, all different and complete, each as a request of its own gives it."""
    sampling = SamplingParams(1.0, seed=2**64 - 3, presence_penalty=0.5)
    engine = harness(model)
    first = engine.add(PROMPT[:37], 30, sampling)
    choices = [first] + [
        engine.add(
            PROMPT[:37],
            30,
            replace(sampling, seed=choice_seed(sampling.seed, choice)),
            choice=choice,
            arrival=first.request.arrival,
            fork_of=first.request,
        )
        for choice in range(1, 4)
    ]
    engine.run()
    singles = [
        engine.generate(PROMPT[:37], 30, replace(sampling, seed=choice_seed(sampling.seed, choice)))
        for choice in range(4)
    ]
    assert [each.token_ids for each in choices] == [each.token_ids for each in singles]
    assert len({tuple(each.token_ids) for each in choices}) == 4


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_logprobs_are_of_the_raw_distribution(
    model: LoadedModel, reference: LlamaForCausalLM, temperature: float
) -> None:
    """D14, D15, D16: no temperature, penalty or mask moves them, and how many alternatives are asked for neither."""
    engine = harness(model)
    outcomes = [
        engine.generate(PROMPT[:20], 12, replace(PENALIZED, temperature=temperature, bad_words=[[8]], logprobs=count))
        for count in (0, 4, 10)
    ]
    for outcome in outcomes:
        assert_logprobs_of(outcome, reference)
    none, four, ten = ([told for told in outcome.logprobs if told is not None] for outcome in outcomes)
    assert [len(told.top_ids) for told in (none[0], four[0], ten[0])] == [0, 4, 10]
    assert [(told.logprob, told.rank) for told in none] == [(told.logprob, told.rank) for told in ten]
    assert [told.top_logprobs for told in four] == [told.top_logprobs[:4] for told in ten]


def test_logprobs_of_some_requests_in_a_batch_are_told_to_those_alone(
    model: LoadedModel, reference: LlamaForCausalLM
) -> None:
    engine = harness(model)
    counts = [None, 3, None, 0, 7]
    outcomes = [
        engine.add(PROMPT[: 10 + number], 8, SamplingParams(0.8, seed=number, logprobs=count))
        for number, count in enumerate(counts)
    ]
    engine.run()
    for outcome, count in zip(outcomes, counts, strict=True):
        if count is None:
            assert outcome.logprobs == [None] * 8
        else:
            assert_logprobs_of(outcome, reference)
            assert {len(told.top_ids) for told in outcome.logprobs if told is not None} == {count}


def assert_prompt_logprobs_of(outcome: Outcome, reference: LlamaForCausalLM, num_top: int) -> None:
    prompt = outcome.request.token_ids[: outcome.request.num_prompt_tokens]
    expected = expected_logprobs(reference, prompt)
    assert list(outcome.prompt_logprobs) == list(range(1, len(prompt)))
    for position, told in outcome.prompt_logprobs.items():
        row = expected[position - 1]
        assert told.logprob == pytest.approx(float(row[prompt[position]]), abs=1e-4)
        assert told.rank == int((row > row[prompt[position]]).sum()) + 1
        assert list(told.top_ids) == row.topk(num_top).indices.tolist()


@pytest.mark.parametrize("chunk", [2048, 7])
def test_prompt_logprobs_twice_are_whole_both_times(
    model: LoadedModel, reference: LlamaForCausalLM, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C14: a prompt of two blocks and a token, and what of it is cached is computed all the same."""
    monkeypatch.setattr(runner, "_MAX_LOGITS_BYTES", 5 * 4 * model.config.vocab_size)
    engine = harness(model, max_num_batched_tokens=chunk, max_num_seqs=7)
    prompt = PROMPT[: 2 * BLOCK_SIZE + 1]
    engine.generate(prompt, 3)
    for _ in range(2):
        outcome = engine.generate(prompt, 3, replace(GREEDY, logprobs=1), prompt_logprobs=2)
        assert outcome.request.num_cached_tokens == 0
        assert_prompt_logprobs_of(outcome, reference, 2)
        assert_logprobs_of(outcome, reference)


def test_prompt_logprobs_without_output_are_told(model: LoadedModel, reference: LlamaForCausalLM) -> None:
    outcome = harness(model).generate(PROMPT[:20], 0, prompt_logprobs=0)
    assert_prompt_logprobs_of(outcome, reference, 0)
    assert outcome.token_ids == []
    assert outcome.ended is not None
    assert outcome.ended.reason is FinishReason.LENGTH


def test_prompt_logprobs_of_preempted_requests_are_told_once(model: LoadedModel, reference: LlamaForCausalLM) -> None:
    """The harness asserts that nothing is told twice."""
    engine = harness(model, num_blocks=16, max_num_batched_tokens=11, max_num_seqs=8)
    outcomes = [engine.add(PROMPT[number : number + 40], 40, prompt_logprobs=1) for number in range(6)]
    engine.run()
    assert sum(outcome.request.num_preemptions for outcome in outcomes) > 0
    for outcome in outcomes:
        assert_prompt_logprobs_of(outcome, reference, 1)


def test_logits_within_the_prompt_that_are_no_numbers_end_the_request(tmp_path: Path) -> None:
    """D18: the last position's are finite, so that without prompt_logprobs nobody notices."""
    tiny = make_tiny()
    with torch.no_grad():
        tiny.lm_head.weight[5, 0] = torch.finfo(torch.float32).max  # overflows where the first number is above 1
        is_finite = tiny(torch.tensor([PROMPT])).logits[0].amax(dim=-1).isfinite().tolist()
    end = next(end for end in range(2, len(PROMPT)) if is_finite[end - 1] and not all(is_finite[:end]))
    tiny.save_pretrained(tmp_path)
    engine = harness(load(tmp_path))
    plain, told = engine.generate(PROMPT[:end], 1), engine.generate(PROMPT[:end], 1, prompt_logprobs=0)
    assert len(plain.token_ids) == 1
    assert told.ended is not None
    assert told.ended.reason is FinishReason.ERROR
    assert told.prompt_logprobs == {}


def test_prompt_logprobs_of_a_prompt_computed_again_are_passed_on_once() -> None:
    """A step in flight when its request is preempted tells what the next one computes again."""
    config = SchedulerConfig(16, 4, 8, 64, frozenset(), "contract")
    scheduler = Scheduler(BlockPool(8), config)
    request = Request(0, PROMPT[:20], 20, GREEDY, StoppingParams(1), prompt_logprobs=0)
    scheduler.add(request)
    items = [TokenLogprobs(-1.0, rank) for rank in range(1, 20)]
    passed_on = []
    for start, end in ((0, 5), (2, 8), (0, 19)):
        told = PromptLogprobs(0, start + 1, items[start:end])
        result = scheduler.commit(scheduler.schedule(), SampledTokens([None], prompt_logprobs={0: told}))
        passed_on += [(told.start, [item.rank for item in told.items]) for told in result.prompt_logprobs]
    assert passed_on == [(1, [1, 2, 3, 4, 5]), (6, [6, 7, 8]), (9, list(range(9, 20)))]


def test_min_tokens_wins_over_stop_tokens_and_end_tokens(model: LoadedModel) -> None:
    """A16, A18: with ignore_eos alone, an end token is a token like others."""
    likely = SamplingParams(0.0, logit_bias={2: 60.0, 30: 50.0})
    engine = harness(model)
    outcomes = [
        engine.generate(PROMPT[:9], 12, likely, stopping=StoppingParams(12, frozenset({30}), ignore_eos, min_tokens))
        for ignore_eos, min_tokens in ((False, 0), (False, 4), (True, 0), (True, 4))
    ]
    assert [len(outcome.token_ids) for outcome in outcomes] == [1, 5, 12, 12]
    assert outcomes[2].token_ids == [2] * 12
    assert outcomes[1].token_ids[-1] == 2
    assert {2, 30}.isdisjoint(outcomes[1].token_ids[:4])


def test_masks_that_leave_no_token_end_the_request_and_no_other(model: LoadedModel) -> None:
    engine = harness(model)
    expected = engine.generate(PROMPT[:9], 6).token_ids
    bad = engine.add(PROMPT[:9], 6, SamplingParams(1.0, allowed_token_ids=[8], bad_words=[[8]]))
    good = engine.add(PROMPT[:9], 6)
    engine.run()
    assert bad.ended is not None
    assert (bad.ended.reason, bad.ended.error) == (FinishReason.ERROR, "no token is left that may be sampled")
    assert bad.ended.error_reason == NOTHING_ALLOWED
    assert good.token_ids == expected
