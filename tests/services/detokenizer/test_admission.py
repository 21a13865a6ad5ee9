"""What of a request only the engine's limits decide."""

from __future__ import annotations

import math

import pytest

from kvern.services.detokenizer.admission import to_add_request
from kvern.services.runtime.errors import InvalidArgument
from kvern.v1.inference_pb2 import ChoiceProgress, GenerateRequest, Output, Resume, Sampling, Stopping, TokenIds
from kvern.v1.replica_pb2 import EngineInfo, ServeRequest

INFO = EngineInfo(vocab_size=100, max_model_len=64)


def serve(bad_words: list[TokenIds] | None = None, **fields: object) -> ServeRequest:
    request = GenerateRequest(token_ids=TokenIds(ids=[5, 6]), **fields)  # type: ignore[arg-type]
    return ServeRequest(request=request, bad_words=bad_words)


def resume(*choices: ChoiceProgress) -> Resume:
    return Resume(seed=7, choices=choices)


def test_log_probabilities_reach_the_engine_only_where_asked_for() -> None:
    add = to_add_request(serve(), INFO)
    assert (add.HasField("logprobs"), add.HasField("prompt_logprobs")) == (False, False)
    add = to_add_request(serve(output=Output(logprobs=0, prompt_logprobs=3)), INFO)
    assert (add.HasField("logprobs"), add.logprobs, add.prompt_logprobs) == (True, 0, 3)


def test_sampling_fields_reach_the_engine_and_bad_words_as_token_ids() -> None:
    sampling = Sampling(
        temperature=0.5,
        min_p=0.25,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={99: 3.0},
        allowed_token_ids=[0, 99],
        bad_words=["no"],
    )
    stopping = Stopping(max_tokens=9, min_tokens=9, stop_token_ids=[99])
    add = to_add_request(serve([TokenIds(ids=[3, 4])], sampling=sampling, stopping=stopping), INFO)
    sampling.ClearField("bad_words")
    assert (add.sampling, add.stopping) == (sampling, stopping)
    assert [list(word.ids) for word in add.bad_words] == [[3, 4]]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("sampling.logit_bias[100]", {"sampling": Sampling(logit_bias={5: 1.0, 100: 1.0})}),
        ("sampling.allowed_token_ids[1]", {"sampling": Sampling(allowed_token_ids=[99, 100])}),
        ("stopping.stop_token_ids[0]", {"stopping": Stopping(stop_token_ids=[101], min_tokens=1)}),
        ("stopping.min_tokens", {"stopping": Stopping(min_tokens=63)}),
        (
            "resume.choices[1].token_ids[0]",
            {
                "sampling": Sampling(n=2),
                "resume": resume(ChoiceProgress(), ChoiceProgress(index=1, token_ids=[100])),
            },
        ),
        ("resume.choices[0].token_ids", {"resume": resume(ChoiceProgress(token_ids=[1] * 63))}),
    ],
)
def test_request_beyond_vocabulary_or_context_is_refused_naming_the_field(
    field: str, fields: dict[str, object]
) -> None:
    """D05, D06."""
    with pytest.raises(InvalidArgument) as refused:
        to_add_request(serve(**fields), INFO)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "sent"),
    [
        (
            "sampling.n",
            ServeRequest(request=GenerateRequest(token_ids=TokenIds(ids=[5]), sampling=Sampling(n=2**32 - 1))),
        ),
        ("token_ids", ServeRequest(request=GenerateRequest(text="Hello"))),
        ("age_s", ServeRequest(request=GenerateRequest(token_ids=TokenIds(ids=[5])), age_s=math.nan)),
        (
            "bad_words[0].ids[0]",
            ServeRequest(request=GenerateRequest(token_ids=TokenIds(ids=[5])), bad_words=[TokenIds(ids=[100])]),
        ),
    ],
)
def test_what_no_router_sends_is_refused_as_well(field: str, sent: ServeRequest) -> None:
    with pytest.raises(InvalidArgument) as refused:
        to_add_request(sent, INFO)
    assert refused.value.field == field
