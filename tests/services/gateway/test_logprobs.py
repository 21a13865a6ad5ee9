"""What is counted of log-probabilities that are held."""

from __future__ import annotations

import pytest

from kvern.services.gateway.errors import ApiError
from kvern.services.gateway.logprobs import HeldLogprobs

from .scripted_router import logprob


def test_held_logprobs_are_sampled_and_likely_ones_as_often_as_they_are_held() -> None:
    held = HeldLogprobs("logprobs", limit=9)
    held.add([logprob("a", -1, a=-1, b=-2)], times=2)
    held.add([logprob("a", -1)] * 3)
    with pytest.raises(ApiError) as refused:
        held.add([logprob("a", -1)])
    assert (refused.value.status, refused.value.param) == (400, "logprobs")
