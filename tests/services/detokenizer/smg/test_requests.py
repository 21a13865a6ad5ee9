"""What of a request can be told from it alone."""

from __future__ import annotations

import pytest

from kvern.services.detokenizer.smg.requests import check_gathered
from kvern.services.runtime.errors import InvalidArgument
from kvern.v1.inference_pb2 import GenerateRequest, Output, Sampling, Stopping, TokenIds

MAX_MODEL_LEN = 131_072


def request(num_prompt_tokens: int = 1, n: int = 1, max_tokens: int | None = None, **output: int) -> GenerateRequest:
    return GenerateRequest(
        token_ids=TokenIds(ids=[1] * num_prompt_tokens),
        sampling=Sampling(n=n),
        stopping=Stopping(max_tokens=max_tokens),
        output=Output(**output),
    )


@pytest.mark.parametrize(
    ("asked", "streams"),
    [
        (request(n=128), False),
        (request(n=2, logprobs=20), False),
        (request(n=128, max_tokens=100, logprobs=64), False),
        (request(n=128, logprobs=64), True),
        (request(100_000, prompt_logprobs=64), False),
    ],
)
def test_log_probabilities_that_fit_a_message_are_told(asked: GenerateRequest, streams: bool) -> None:
    check_gathered(asked, MAX_MODEL_LEN, streams=streams)


@pytest.mark.parametrize(
    ("asked", "streams"), [(request(n=8, logprobs=20), False), (request(120_000, prompt_logprobs=64), True)]
)
def test_log_probabilities_beyond_a_message_are_refused(asked: GenerateRequest, streams: bool) -> None:
    with pytest.raises(InvalidArgument, match=r"^sampling_params.logprobs: .* 67108864 bytes"):
        check_gathered(asked, MAX_MODEL_LEN, streams=streams)
