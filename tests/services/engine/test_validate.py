"""What would bring an engine down is refused, whatever a front door let through."""

from __future__ import annotations

import math

import pytest

from kvern.engine.errors import RequestRefused
from kvern.services.engine.validate import check_add
from kvern.v1.engine_pb2 import AddRequest, ResumedChoice
from kvern.v1.inference_pb2 import Constraint, Sampling, Stopping, TokenIds


def add(**fields: object) -> AddRequest:
    right = {"id": 1, "prompt_token_ids": [1], "sampling": Sampling(seed=1), "stopping": Stopping(max_tokens=1)}
    return AddRequest(**(right | fields))  # type: ignore[arg-type]


def test_right_request_is_taken() -> None:
    check_add(add())
    check_add(add(stopping=Stopping(max_tokens=0), logprobs=0, prompt_logprobs=0))
    check_add(add(sampling=Sampling(n=2), resumed=[ResumedChoice(index=1)], age_s=3.0))
    check_add(add(bad_words=[TokenIds(ids=[1] * 1028)] * 512))


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("sampling.n", {"sampling": Sampling(n=2**32 - 1)}),
        ("sampling.temperature", {"sampling": Sampling(temperature=math.nan)}),
        ("output.logprobs", {"logprobs": 2**31}),
        ("output.prompt_logprobs", {"prompt_logprobs": 2**31}),
        ("token_ids", {"prompt_token_ids": []}),
        ("stopping.max_tokens", {"stopping": Stopping()}),
        ("constraint.regex", {"constraint": Constraint(regex="a" * 10**6)}),
        ("", {"age_s": math.nan}),
        ("", {"age_s": -1.0}),
        ("sampling.bad_words", {"bad_words": [TokenIds(ids=[1])] * 513}),
        ("sampling.bad_words", {"bad_words": [TokenIds(ids=[1]), TokenIds(ids=[1] * 1029)]}),
        ("resume", {"resumed": [ResumedChoice(index=1)]}),
        ("resume", {"sampling": Sampling(n=2), "resumed": [ResumedChoice(), ResumedChoice()]}),
    ],
)
def test_wrong_request_is_refused_naming_the_clients_field(field: str, fields: dict[str, object]) -> None:
    with pytest.raises(RequestRefused) as refused:
        check_add(add(**fields))
    assert refused.value.field == field
