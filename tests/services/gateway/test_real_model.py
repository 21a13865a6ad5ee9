"""The HTTP door and the router's own in front of a whole set with the real small model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from kvern.services.runtime.channel import open_channel
from kvern.v1 import inference_pb2, inference_pb2_grpc
from tests.up_process import MAX_MODEL_LEN, UpProcess

CHAT = "/v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


@dataclass
class Setup:
    """A running set of services."""

    http: httpx.AsyncClient
    inference: inference_pb2_grpc.InferenceServiceAsyncStub

    async def chat(self, **fields: object) -> dict[str, Any]:
        response = await self.http.post(CHAT, json=QUESTION | fields)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


@pytest_asyncio.fixture
async def setup(running_set: UpProcess) -> AsyncIterator[Setup]:
    async with (
        open_channel(running_set.listen) as channel,
        httpx.AsyncClient(base_url=f"http://{running_set.http}", timeout=60) as http,
    ):
        yield Setup(http, inference_pb2_grpc.InferenceServiceStub(channel))


async def test_chat_stop_string_is_cut_off(setup: Setup) -> None:
    answer = await setup.chat(max_tokens=16, stop=[" is"])
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("The capital of France", "stop")


async def test_chat_max_completion_tokens_ends_with_length(setup: Setup) -> None:
    answer = await setup.chat(max_completion_tokens=3)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


async def test_chat_seed_repeats_the_draws(setup: Setup) -> None:
    texts = {
        seed: {
            (await setup.chat(max_tokens=12, temperature=1, seed=seed))["choices"][0]["message"]["content"]
            for _ in range(2)
        }
        for seed in (1, 2)
    }
    assert [len(each) for each in texts.values()] == [1, 1]
    assert texts[1] != texts[2]


async def test_chat_clients_leave_mid_stream_frees_all_blocks(setup: Setup, running_set: UpProcess) -> None:
    """E02."""

    async def leave_early() -> None:
        body = QUESTION | {"stream": True, "temperature": 1, "max_tokens": 200}
        async with setup.http.stream("POST", CHAT, json=body) as response:
            lines = response.aiter_lines()
            while "content" not in await anext(lines):
                pass

    async with asyncio.TaskGroup() as tasks:
        for _ in range(5):
            tasks.create_task(leave_early())
    running_set.wait_idle()
    assert "Paris" in (await setup.chat(max_tokens=16))["choices"][0]["message"]["content"]


async def test_generate_text_and_its_token_ids_give_the_same(setup: Setup) -> None:
    tokenized = await setup.inference.Tokenize(inference_pb2.TokenizeRequest(text="The capital of France is"))
    assert tokenized.max_context == MAX_MODEL_LEN
    decoded = await setup.inference.Detokenize(inference_pb2.DetokenizeRequest(ids=tokenized.ids))
    assert decoded.text == "The capital of France is"
    prompts: list[dict[str, Any]] = [
        {"text": "The capital of France is"},
        {"token_ids": inference_pb2.TokenIds(ids=tokenized.ids)},
    ]
    texts = []
    for prompt in prompts:
        request = inference_pb2.GenerateRequest(
            **prompt,
            sampling=inference_pb2.Sampling(temperature=0),
            stopping=inference_pb2.Stopping(max_tokens=4),
        )
        texts.append("".join([event.delta.text async for event in setup.inference.Generate(request, timeout=60)]))
    assert texts[0] == texts[1]
    assert "Paris" in texts[0]


async def test_generate_token_id_beyond_vocabulary_is_refused(setup: Setup) -> None:
    """B09."""
    [model] = (await setup.inference.ListModels(inference_pb2.ListModelsRequest())).models
    for token_id in (model.vocab_size, 2**32 - 1):
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, token_id]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await setup.inference.Generate(request, timeout=60).read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "token_ids.ids[1]" in (refused.value.details() or "")
