"""Good requests get answers, bad ones a clear status, and bad ones harm nobody."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import grpc
import pytest

from kvern.client import Client, KvernError
from kvern.v1.inference_pb2 import FINISH_REASON_LENGTH, GenerateRequest, Sampling, Stopping, TokenIds
from tests.e2e.generation import assert_serves, collect
from tests.up_process import MAX_MODEL_LEN, UpProcess

VOCAB_SIZE = 49152
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def _token_ids(*ids: int) -> TokenIds:
    return TokenIds(ids=ids)


def test_chat_about_france_names_paris(client: Client) -> None:
    assert_serves(client)


def test_http_chat_about_france_names_paris(running_set: UpProcess) -> None:
    body: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 8,
    }
    request = urllib.request.Request(
        f"http://{running_set.http}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] > 0


def test_second_of_two_requests_reuses_their_shared_prefix(client: Client) -> None:
    shared = list(range(1000, 1200))
    first = collect(client.generate([*shared, 2000], max_tokens=1))
    second = collect(client.generate([*shared, 3000], max_tokens=1))
    assert first.finished.usage.cached_tokens == 0
    assert second.finished.usage.cached_tokens >= 192


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (GenerateRequest(text=""), INVALID, "text"),  # B07
        (GenerateRequest(text="mill " * 2 * MAX_MODEL_LEN), INVALID, "prompt"),
        (GenerateRequest(text="a", stopping=Stopping(max_tokens=0)), INVALID, "stopping.max_tokens"),
        (GenerateRequest(text="a", sampling=Sampling(temperature=-1)), INVALID, "sampling.temperature"),
        (GenerateRequest(text="a", model="nobody"), grpc.StatusCode.NOT_FOUND, None),
        (GenerateRequest(token_ids=_token_ids(5, VOCAB_SIZE)), INVALID, "token_ids.ids[1]"),  # B09
        (GenerateRequest(token_ids=_token_ids(2**32 - 1)), INVALID, "token_ids.ids[0]"),  # B09
    ],
    ids=["empty", "too long", "max_tokens 0", "temperature -1", "unknown model", "id = vocabulary", "id = 2^32-1"],
)
def test_bad_request_is_refused_while_a_neighbour_goes_on(
    client: Client, request_: GenerateRequest, code: grpc.StatusCode, field: str | None
) -> None:
    """B07, B09."""
    neighbour = client.generate("The mill", max_tokens=8, temperature=0)
    next(neighbour)
    with pytest.raises(KvernError) as refused:
        list(client.stream(request_))
    assert (refused.value.code, refused.value.field) == (code, field)
    assert refused.value.message
    assert collect(neighbour).finished.usage.completion_tokens > 0


def test_prompt_at_the_limit_yields_one_token_and_beyond_it_is_refused(client: Client) -> None:
    """B21."""
    longest = [1000] * (MAX_MODEL_LEN - 1)
    finished = collect(client.generate(longest)).finished
    assert (finished.usage.completion_tokens, finished.reason) == (1, FINISH_REASON_LENGTH)
    for prompt in ([*longest, 1000], [*longest, 1000, 1000]):
        with pytest.raises(KvernError, match=str(MAX_MODEL_LEN)) as refused:
            collect(client.generate(prompt))
        assert refused.value.code is INVALID


def test_request_id_in_flight_is_refused_and_the_first_goes_on(client: Client) -> None:
    """C27."""
    # Long enough to be under way still.
    first = client.generate("The mill", request_id="twin", max_tokens=64, temperature=0, ignore_eos=True)
    next(first)
    with pytest.raises(KvernError) as refused:
        list(client.generate("The mill", request_id="twin", max_tokens=1))
    assert refused.value.code is grpc.StatusCode.ALREADY_EXISTS
    assert collect(first).finished.usage.completion_tokens > 0
