"""Gateway and router with a real tokenizer, detokenizer, engine and model behind them, each its own process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.services.runtime.channel import open_channel
from kvern.v1 import inference_pb2, inference_pb2_grpc, router_pb2, router_pb2_grpc
from tests.services.processes import running

from .http_client import until_listening

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
MAX_MODEL_LEN = 256


@dataclass
class Setup:
    """A running set of services."""

    http: httpx.AsyncClient
    channel: grpc.aio.Channel

    @property
    def inference(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    async def chat(self, **fields: object) -> dict[str, Any]:
        response = await self.http.post(CHAT, json=QUESTION | fields)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def stream(self, **fields: object) -> list[dict[str, Any]]:
        response = await self.http.post(CHAT, json=QUESTION | {"stream": True} | fields)
        *events, done = response.text.strip().split("\n\n")
        assert done == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    async def until_idle(self) -> None:
        """Wait until nothing runs and every block is free."""
        router = router_pb2_grpc.RouterServiceStub(self.channel)
        async with asyncio.timeout(10):
            while True:
                [replica] = (await router.ListReplicas(router_pb2.ListReplicasRequest())).replicas
                if not (replica.num_in_flight or replica.load.num_running or replica.load.num_used_blocks):
                    return
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup(tmp_path_factory: pytest.TempPathFactory, listen: str) -> AsyncIterator[Setup]:
    folder = tmp_path_factory.mktemp("set")
    engine, detokenizer, tokenizer, router = (
        f"unix:{folder}/{name}.sock" for name in ("engine", "detokenizer", "tokenizer", "router")
    )
    flags = {
        "engine": ["--num-blocks", "64", "--max-model-len", str(MAX_MODEL_LEN), "--num-threads", "1"],
        "detokenizer": ["--engine", engine],
        "tokenizer": [],
        "router": ["--tokenizer", tokenizer, "--replicas", detokenizer],
        "gateway": ["--router", router],
    }
    async with AsyncExitStack() as stack:
        for service in flags:
            address = listen if service == "gateway" else f"unix:{folder}/{service}.sock"
            log = folder / f"{service}.log"
            await stack.enter_async_context(running(service, "--listen", address, *flags[service], log=log))
        channel = await stack.enter_async_context(open_channel(router))
        await _until_serving(channel)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{listen}", timeout=60))
        await until_listening(http)
        yield Setup(http, channel)


async def _until_serving(channel: grpc.aio.Channel) -> None:
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True)
    while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
        pass
    watch.cancel()


async def test_chat_streamed_and_not_is_the_same_right_answer(setup: Setup) -> None:
    answer = await setup.chat(max_tokens=16)
    text = answer["choices"][0]["message"]["content"]
    assert "Paris" in text
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    *chunks, last = await setup.stream(max_tokens=16, stream_options={"include_usage": True})
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


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


@pytest.mark.parametrize(
    ("param", "status", "fields"),
    [
        ("messages", 400, {"messages": [{"role": "user", "content": "word " * MAX_MODEL_LEN}]}),
        ("max_tokens", 400, {"max_tokens": MAX_MODEL_LEN}),
        ("model", 404, {"model": "huge"}),
    ],
)
async def test_chat_beyond_what_is_served_names_param(
    setup: Setup, param: str, status: int, fields: dict[str, object]
) -> None:
    response = await setup.http.post(CHAT, json=QUESTION | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_chat_clients_leave_mid_stream_frees_all_blocks(setup: Setup) -> None:
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
    await setup.until_idle()
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
