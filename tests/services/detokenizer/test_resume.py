"""Streams that broke go on exactly where they were, wherever that was."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern.services.detokenizer.incremental_decode import DecoderFactory
from kvern.services.runtime.errors import InvalidArgument
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import Tokenizer, load_tokenizer
from kvern.v1 import inference_pb2, replica_pb2
from kvern.v1.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, ChoiceProgress, GenerateRequest
from tests.services import small_tokenizers

from .driver import Driver, Received, ended, received
from .scripted_engine import EOS


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(find_model("smollm2"))


@pytest.fixture(scope="module")
def decoders(tokenizer: Tokenizer) -> DecoderFactory:
    return DecoderFactory(tokenizer)


@pytest.fixture(scope="module", params=["smollm2", "sentencepiece"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "smollm2":
        return load_tokenizer(find_model("smollm2"))
    return load_tokenizer(small_tokenizers.save(small_tokenizers.sentencepiece(), tmp_path_factory.mktemp("model")))


def resumed(request: GenerateRequest, choices: dict[int, Received]) -> GenerateRequest:
    """The request that goes on after what was received, as the router and the client write it."""
    again = GenerateRequest()
    again.CopyFrom(request)
    again.resume.seed = request.sampling.seed
    for index in range(request.sampling.n):
        choice = choices.get(index, Received())
        if choice.finished is None:
            again.resume.choices.add(index=index, token_ids=choice.token_ids, text_bytes=choice.text_bytes)
    return again


def outcome(finished: inference_pb2.Finished | None) -> tuple[object, ...]:
    assert finished is not None
    return finished.reason, finished.stop, finished.stop_token_id, finished.usage.completion_tokens


def check_rest(
    whole: dict[int, Received], before: Sequence[replica_pb2.ServeResponse], after: Sequence[replica_pb2.ServeResponse]
) -> None:
    first, rest = received(before), received(after)
    for index, choice in whole.items():
        had, got = first.get(index, Received()), rest.get(index, Received())
        assert had.finished is None or got == Received()
        assert had.text + got.text == choice.text
        assert had.token_ids + got.token_ids == choice.token_ids
        assert had.logprobs + got.logprobs == choice.logprobs
        assert outcome(got.finished or had.finished) == outcome(choice.finished)
        assert (got if got.finished else had).text_bytes == len(choice.text.encode())


PIECES = st.sampled_from(["a", "b", " ab", "日", "😀", "é", "<|im_end|>", "<|im_start|>", "</s>", "\n"])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
async def test_stream_cut_anywhere_and_resumed_gives_exactly_the_rest(either: Tokenizer, data: st.DataObject) -> None:
    """Ids are cut to one length: an engine ends no choice without a reason that its tokens show."""
    texts = data.draw(st.lists(st.lists(PIECES, min_size=1, max_size=8).map("".join), min_size=1, max_size=2))
    stray = data.draw(st.lists(st.integers(0, 300), max_size=2))
    stop = data.draw(st.lists(st.sampled_from(["ab", "b日", "<|im_end|>", "</s>a", "a\n", "\ufffd"]), max_size=2))
    output = inference_pb2.Output(
        echo=data.draw(st.booleans()),
        token_ids=data.draw(st.booleans()),
        logprobs=data.draw(st.sampled_from([None, 1])),
        skip_special_tokens=data.draw(st.sampled_from([None, False])),
    )
    ids = [[*either.encode(text, add_special_tokens=False), *stray] for text in texts]
    stopping = inference_pb2.Stopping(
        max_tokens=min(data.draw(st.integers(1, 20)), *map(len, ids)),
        stop=stop,
        include_stop=data.draw(st.booleans()),
        stop_token_ids=data.draw(st.lists(st.sampled_from(either.encode("ab日", add_special_tokens=False)))),
    )
    request = GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=either.encode("é p", add_special_tokens=False)),
        sampling=inference_pb2.Sampling(seed=7, n=len(texts)),
        stopping=stopping,
        output=output,
    )
    outputs = {
        index: ended(index, each, stopping.max_tokens, stopping.stop_token_ids) for index, each in enumerate(ids)
    }
    tokens_a_step = data.draw(st.integers(1, 3))
    decoders = DecoderFactory(either)
    frames = await Driver(decoders, outputs, tokens_a_step).run(request)
    whole = received(frames)
    for cut in range(len(frames)):
        again = resumed(request, received(frames[:cut]))
        rest = await Driver(decoders, outputs, tokens_a_step).run(again)
        check_rest(whole, frames[:cut], rest)


def request_of(tokenizer: Tokenizer, *choices: ChoiceProgress, max_tokens: int = 50) -> GenerateRequest:
    return GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[5, 6]),
        sampling=inference_pb2.Sampling(seed=7, n=3),
        stopping=inference_pb2.Stopping(max_tokens=max_tokens, stop=[" two"]),
        resume=inference_pb2.Resume(seed=7, choices=choices),
    )


async def test_choices_that_are_not_resumed_produce_nothing(tokenizer: Tokenizer, decoders: DecoderFactory) -> None:
    ids = tokenizer.encode(" one three", add_special_tokens=False)
    request = request_of(tokenizer, ChoiceProgress(index=1, token_ids=ids[:1], text_bytes=4))
    frames = await Driver(decoders, {1: ended(1, ids, 50)}).run(request)
    choices = received(frames)
    assert (set(choices), choices[1].text) == ({1}, " three")
    assert choices[1].finished is not None
    assert choices[1].finished.usage.completion_tokens == 2
    started = inference_pb2.GenerateResponse.FromString(frames[0].client_frame).started
    assert (started.seed, started.prompt_tokens) == (7, 2)


async def test_choices_that_had_ended_finish_without_the_engine(tokenizer: Tokenizer, decoders: DecoderFactory) -> None:
    """One at a stop string, one at an end token, one at max_tokens; what of their text was not sent is."""
    [one], [two] = (tokenizer.encode(text, add_special_tokens=False) for text in (" one", " two"))
    request = request_of(
        tokenizer,
        ChoiceProgress(index=0, token_ids=[one, two], text_bytes=1),
        ChoiceProgress(index=1, token_ids=[one, EOS], text_bytes=4),
        ChoiceProgress(index=2, token_ids=[one] * 4, text_bytes=8),
        max_tokens=4,
    )
    choices = received(await Driver(decoders, {}).run(request))
    assert [choices[index].text for index in range(3)] == ["one", "", " one one"]
    assert [outcome(choices[index].finished) for index in range(3)] == [
        (FINISH_REASON_STOP, " two", 0, 2),
        (FINISH_REASON_STOP, "", EOS, 2),
        (FINISH_REASON_LENGTH, "", 0, 4),
    ]


@pytest.mark.parametrize(
    ("text_bytes", "message"),
    [(6, r"must be at most 5, the text of these tokens, got 6"), (2, r"must not cut a character, got 2")],
)
async def test_bytes_that_the_text_does_not_have_are_refused(
    tokenizer: Tokenizer, decoders: DecoderFactory, text_bytes: int, message: str
) -> None:
    ids = tokenizer.encode("日 b t", add_special_tokens=False)
    request = request_of(tokenizer, ChoiceProgress(index=0, token_ids=ids, text_bytes=text_bytes))
    with pytest.raises(InvalidArgument, match=message) as refused:
        await Driver(decoders, {}).run(request)
    assert refused.value.field == "resume.choices[0].text_bytes"
