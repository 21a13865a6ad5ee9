"""Completions at the HTTP door."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvern.services.gateway.completion_request import MAX_PROMPTS
from kvern.services.gateway.logprobs import MAX_HELD_OF_COMPLETION
from kvern.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    GenerateRequest,
    GenerateResponse,
    PromptLogprobs,
)

from .scripted_router import STARTED, delta, fails_after, finished, logprob, responds, together
from .setup import COMPLETIONS, Setup

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def echo(request: GenerateRequest) -> AsyncIterator[GenerateResponse]:
    """Answer each choice with its prompt and its number."""
    yield STARTED
    for index in range(max(request.sampling.n, 1)):
        yield delta(f"{request.text or list(request.token_ids.ids)}", index)
        yield delta(f" {index}", index)
        yield finished(index=index)


async def test_completion_answers_in_openai_form(setup: Setup) -> None:
    response = await setup.complete(request_id="r1")
    answer = response.json()
    assert response.status_code == 200
    assert answer.pop("created") > 0
    assert answer.pop("usage")["total_tokens"] == 9
    assert answer == {
        "id": "cmpl-r1",
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "stop"}],
    }


async def test_completion_stream_sends_text_then_why_it_ended_then_usage(setup: Setup) -> None:
    setup.router.behaviour = responds(STARTED, delta("a"), delta("b"), finished(FINISH_REASON_LENGTH))
    *chunks, last, done = await setup.events(COMPLETIONS, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert [(each["choices"][0]["text"], each["choices"][0]["finish_reason"]) for each in chunks] == [
        ("a", None),
        ("b", None),
        ("", "length"),
    ]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_completion_of_each_form_of_prompt_asks_for_each_prompt(
    setup: Setup, prompt: object, expected: list[Any]
) -> None:
    setup.router.behaviour = echo
    answer = (await setup.complete(prompt=prompt, n=2)).json()
    texts = [f"{each} {choice}" for each in expected for choice in range(2)]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    assert answer["usage"]["prompt_tokens"] == 7 * len(expected)
    assert answer["usage"]["completion_tokens"] == 2 * len(texts)
    chunks = await setup.events(COMPLETIONS, prompt=prompt, n=2)
    streamed = [""] * len(texts)
    for chunk in chunks[:-1]:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts


async def test_completion_failure_of_one_prompt_is_that_of_all(setup: Setup) -> None:
    async def fails_for_b(request: GenerateRequest) -> AsyncIterator[GenerateResponse]:
        async for response in fails_after(ValueError("x"))(request) if request.text == "b" else echo(request):
            yield response

    setup.router.behaviour = together(3, fails_for_b)
    assert (await setup.complete(prompt=["a", "b", "c"])).status_code == 500


@pytest.mark.parametrize(
    ("fields", "max_tokens"), [({}, 16), ({"max_tokens": None}, 16), ({"min_tokens": 20}, 20), ({"max_tokens": 3}, 3)]
)
async def test_completion_is_short_unless_told_otherwise(
    setup: Setup, fields: dict[str, object], max_tokens: int
) -> None:
    """B20, as OpenAI has it for this route."""
    assert (await setup.complete(**fields)).status_code == 200
    assert setup.router.received[0].stopping.max_tokens == max_tokens


async def test_completion_with_echo_and_no_token_asks_for_the_prompt_alone(setup: Setup) -> None:
    """A22."""
    assert (await setup.complete(echo=True, max_tokens=0)).status_code == 200
    [request] = setup.router.received
    assert (request.output.echo, request.stopping.max_tokens) == (True, 0)


async def test_completion_logprobs_have_their_own_form(setup: Setup) -> None:
    first = logprob("a", -0.5, a=-0.5, x=-2)
    second, third = logprob(b"\xc3", -1.0), logprob(b"\xa9", -3.0)
    setup.router.behaviour = responds(
        STARTED, delta("a", logprobs=[first]), delta("é", logprobs=[second, third]), finished()
    )
    expected = {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.5, -1.0, -3.0],
        "top_logprobs": [{"a": -0.5, "x": -2.0}, {"bytes:\\xc3": -1.0}, {"bytes:\\xa9": -3.0}],
        "text_offset": [0, 1, 1],
    }
    assert (await setup.complete(logprobs=2)).json()["choices"][0]["logprobs"] == expected
    chunks = await setup.events(COMPLETIONS, logprobs=0)
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    assert [each["tokens"] for each in told if each] == [["a"], expected["tokens"][1:]]
    assert told[1]["text_offset"] == [1, 1]
    assert [request.output.logprobs for request in setup.router.received] == [2, 0]
    assert setup.router.received[1].output.HasField("logprobs")  # D15


async def test_completion_logprobs_with_echo_begin_with_the_prompts(setup: Setup) -> None:
    prompt = GenerateResponse(
        prompt_logprobs=PromptLogprobs(start=1, items=[logprob(" b", -1, b=-1), logprob("c", -2)])
    )
    setup.router.behaviour = responds(STARTED, prompt, delta("å bcd", logprobs=[logprob("d", -3)]), finished())
    told = (await setup.complete(logprobs=1, echo=True)).json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["å", " b", "c", "d"]
    assert told["token_logprobs"] == [None, -1, -2, -3]
    assert told["top_logprobs"][0] is None
    assert told["text_offset"] == [0, 1, 3, 4]
    assert setup.router.received[0].output.prompt_logprobs == 1


async def test_completion_with_more_logprobs_than_an_answer_may_hold_is_refused(setup: Setup) -> None:
    tokens = [logprob("a", -1, a=-1, b=-2, c=-3)] * 1024
    deltas = [delta("a", logprobs=tokens)] * (MAX_HELD_OF_COMPLETION // 4096)
    setup.router.behaviour = responds(STARTED, *deltas, delta("a", logprobs=tokens[:1]), finished())
    response = await setup.complete(logprobs=3)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")


async def test_completion_whose_prompt_has_too_many_logprobs_to_hold_is_refused_in_a_stream(setup: Setup) -> None:
    tokens = [logprob("a", -1, a=-1, b=-2, c=-3)] * 4096
    prompt = GenerateResponse(prompt_logprobs=PromptLogprobs(start=1, items=tokens))
    setup.router.behaviour = responds(STARTED, *[prompt] * (MAX_HELD_OF_COMPLETION // 16384 // 2), prompt, delta("a"))
    response = await setup.complete(logprobs=3, echo=True, n=2, stream=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("best_of", {"best_of": 3}),
        ("suffix", {"suffix": "x"}),
        ("prompt", {"prompt": ""}),  # B07
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": ["a"] * (MAX_PROMPTS + 1)}),
        ("prompt[1]", {"prompt": ["a", ""]}),
        ("prompt[1]", {"prompt": ["a", 5]}),
        ("prompt[0]", {"prompt": [[], [1]]}),
        ("prompt[1]", {"prompt": [1, -1]}),
        ("prompt[1]", {"prompt": [1, 2**32]}),  # B09
        ("prompt[0][1]", {"prompt": [[1, "a"]]}),
        ("prompt", {"prompt": None}),
        ("n", {"n": 128, "prompt": ["a"] * 5}),
        ("logprobs", {"logprobs": 65}),
        ("logprobs", {"logprobs": True}),
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("max_tokens", {"max_tokens": 0}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
    ],
)
async def test_completion_bad_value_names_param(setup: Setup, param: str, fields: dict[str, object]) -> None:
    response = await setup.complete(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_completion_of_n_choices_may_say_best_of(setup: Setup) -> None:
    setup.router.behaviour = echo
    assert len((await setup.complete(best_of=2, n=2)).json()["choices"]) == 2
