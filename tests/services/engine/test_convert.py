"""Protobuf messages to engine objects and back."""

from __future__ import annotations

import pytest

from kvern.engine.errors import RequestRefused
from kvern.engine.plan import PromptLogprobs, TokenLogprobs
from kvern.engine.request import Request, SamplingParams, StoppingParams
from kvern.services.engine import convert
from kvern.services.engine.convert import arrival_of, choice_seed, choices_of, to_prompt_logprobs, to_requests
from kvern.services.engine.servicer import Stream
from kvern.v1.engine_pb2 import AddRequest, ResumedChoice
from kvern.v1.inference_pb2 import Sampling, Stopping, TokenIds


def requests_of(**fields: object) -> list[Request]:
    add = AddRequest(**({"prompt_token_ids": [5, 6]} | fields))  # type: ignore[arg-type]
    count = len(choices_of(add))
    return to_requests(add, request_ids=list(range(count)), arrival=7, default_seed=3, vocab_size=100)


def test_every_sampling_field_is_taken_over() -> None:
    sampling = Sampling(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        presence_penalty=1.5,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        seed=2**64 - 1,
        logit_bias={5: -3.5},
        allowed_token_ids=[5, 6],
    )
    stopping = Stopping(max_tokens=9, min_tokens=2, stop_token_ids=[8], ignore_eos=True)
    [request] = requests_of(
        sampling=sampling, stopping=stopping, bad_words=[TokenIds(ids=[1, 2])], logprobs=0, prompt_logprobs=4
    )
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        seed=2**64 - 1,
        min_p=0.125,
        presence_penalty=1.5,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias={5: -3.5},
        allowed_token_ids=(5, 6),
        bad_words=((1, 2),),
        logprobs=0,
    )
    assert request.stopping == StoppingParams(9, frozenset({8}), ignore_eos=True, min_tokens=2)
    assert request.prompt_logprobs == 4


def test_arrival_is_earlier_for_an_aged_request_and_never_that_of_another() -> None:
    young, aged = AddRequest(), AddRequest(age_s=0.5)
    first, twin, moved = arrival_of(young, 1, 100.0), arrival_of(young, 2, 100.0), arrival_of(aged, 3, 100.4)
    assert moved < first < twin < arrival_of(aged, 4, 101.0)
    assert {request.arrival for request in requests_of(sampling=Sampling(n=2))} == {7}


def test_fields_left_out_ask_for_nothing() -> None:
    [request] = requests_of(stopping=Stopping(max_tokens=9))
    assert request.sampling == SamplingParams(seed=3, allowed_token_ids=(), bad_words=())
    assert request.prompt_logprobs is None
    assert request.reads_cache


def test_choices_have_derived_seeds_and_the_first_tells_of_the_prompt() -> None:
    choices = requests_of(sampling=Sampling(n=3, seed=9), prompt_logprobs=0)
    assert [each.sampling.seed for each in choices] == [choice_seed(9, choice) for choice in range(3)]
    assert [each.prompt_logprobs for each in choices] == [0, None, None]


def test_resumed_choices_alone_go_on_after_their_output() -> None:
    resumed = [ResumedChoice(index=2, token_ids=[7, 8]), ResumedChoice(index=1)]
    choices = requests_of(sampling=Sampling(n=3, seed=9), stopping=Stopping(max_tokens=3), resumed=resumed)
    assert [each.choice for each in choices] == [1, 2]
    assert [each.token_ids for each in choices] == [[5, 6], [5, 6, 7, 8]]
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in choices] == [(2, 0), (2, 2)]
    assert [each.sampling.seed for each in choices] == [choice_seed(9, 1), choice_seed(9, 2)]


def test_resumed_choice_that_has_all_its_tokens_is_refused() -> None:
    with pytest.raises(RequestRefused, match="choice 0 has 3 tokens, max_tokens is 3"):
        requests_of(stopping=Stopping(max_tokens=3), resumed=[ResumedChoice(token_ids=[7, 8, 9])])


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("token_ids", {"prompt_token_ids": [5, 100]}),
        ("sampling.logit_bias", {"sampling": Sampling(logit_bias={100: 1.0})}),
        ("sampling.allowed_token_ids", {"sampling": Sampling(allowed_token_ids=[100])}),
        ("sampling.bad_words", {"bad_words": [TokenIds(ids=[1]), TokenIds(ids=[1, 100])]}),
        ("stopping.stop_token_ids", {"stopping": Stopping(stop_token_ids=[101])}),
        ("resume", {"stopping": Stopping(max_tokens=3), "resumed": [ResumedChoice(token_ids=[101])]}),
    ],
)
def test_token_ids_that_would_break_the_engine_are_refused(field: str, fields: dict[str, object]) -> None:
    """D05, D06."""
    with pytest.raises(RequestRefused) as refused:
        requests_of(**fields)
    assert refused.value.field == field


def make_items(count: int, num_top: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-0.5, n, list(range(num_top)), [-1.5] * num_top) for n in range(1, count + 1)]


def test_prompt_logprobs_are_cut_into_pieces_of_bounded_size() -> None:
    told = PromptLogprobs(1, 2**20, make_items(20_000, 20))
    pieces = list(to_prompt_logprobs(told, 2**60))
    assert len(pieces) > 2
    assert all(piece.ByteSize() <= convert.MAX_PIECE_BYTES for piece in pieces)
    assert all(piece.ByteSize() > 0.9 * convert.MAX_PIECE_BYTES for piece in pieces[:-1])
    starts = [2**20 + sum(len(piece.items) for piece in pieces[:index]) for index in range(len(pieces))]
    assert [piece.start for piece in pieces] == starts
    assert [item.rank for piece in pieces for item in piece.items] == list(range(1, 20_001))


async def test_tokens_with_many_alternatives_merge_up_to_a_bound_and_fill_the_stream() -> None:
    stream, logprobs, num_tokens = Stream(), TokenLogprobs(-0.5, 1, list(range(10**6, 10**6 + 64)), [-1.5] * 64), 0
    while not stream.is_full:
        stream.add_token(1, 0, num_tokens, logprobs)
        num_tokens += 1
    told: list[int] = []
    while len(told) < num_tokens:
        output = await stream.next_output()
        assert output is not None
        assert output.ByteSize() < 1.01 * convert.MAX_PIECE_BYTES
        assert [each.entry for each in output.logprobs] == list(range(len(output.token_ids)))
        told += output.token_ids
    assert told == list(range(num_tokens))
    assert not stream.is_full


async def test_outputs_that_merge_stay_bounded_and_in_order() -> None:
    """Prompt log-probabilities begin a new output where one is full; a request's tokens come after them."""
    stream = Stream()
    for number in range(3):
        stream.add_prompt_logprobs(number, PromptLogprobs(number, 1, make_items(4000, 20)))
        stream.add_token(number, 0, 8, None)
        stream.add_token(number, 0, 7, TokenLogprobs(-0.25, 1, [7], [-0.25]))
    outputs = []
    while stream._pending:
        outputs.append(await stream.next_output())
    assert len(outputs) > 1
    assert all(output is not None and output.ByteSize() < 1.01 * convert.MAX_PIECE_BYTES for output in outputs)
    events = [
        event
        for output in outputs
        if output is not None
        for event in [*(("prompt", piece.id) for piece in output.prompt_logprobs), *(("token", i) for i in output.ids)]
    ]
    for number in range(3):
        last_piece = max(index for index, event in enumerate(events) if event == ("prompt", number))
        assert last_piece < events.index(("token", number))
    told = [output.token_ids[each.entry] for output in outputs if output is not None for each in output.logprobs]
    assert told == [7, 7, 7]
