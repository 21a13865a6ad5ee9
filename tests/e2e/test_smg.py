"""SMG, the gateway, in front of two replicas, and the client that people use in front of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from kvern.client import Client
from tests.up_process import PATIENCE_S, UpProcess, free_port, wait_until

from .generation import ask

MODEL = "smollm2"
QUESTION = "What is the capital of France?"
CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def smg(tmp_path_factory: pytest.TempPathFactory, replicas: UpProcess, smg_doors: list[str]) -> Iterator[str]:
    """The gateway's URL, once it sends requests to both replicas."""
    folder, port, metrics = tmp_path_factory.mktemp("smg"), free_port(), free_port()
    command = [str(Path(sys.executable).with_name("smg")), "launch", "--host=127.0.0.1", f"--port={port}"]
    command += ["--prometheus-host=127.0.0.1", f"--prometheus-port={metrics}", "--policy=cache_aware"]
    command += ["--worker-urls", *(f"grpc://{door}" for door in smg_doors[:2])]
    command += ["--retry-max-retries=2", "--health-check-interval-secs=1", "--health-failure-threshold=1"]
    command += ["--health-success-threshold=1"]
    # It would look for the tokenizer at the hub before it asks a replica.
    environ = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _num_healthy(url) == 2, "the gateway knows both replicas")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()


def _num_healthy(url: str) -> int:
    try:
        workers = httpx.get(f"{url}/workers", timeout=PATIENCE_S).json()["workers"]
    except httpx.TransportError:
        return 0
    return sum(worker["is_healthy"] for worker in workers)


@pytest.fixture
def through_smg(smg: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{smg}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def _text(client: openai.OpenAI) -> str:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=8, temperature=0)
    return answer.choices[0].message.content or ""


def test_client_gets_the_same_answer_through_smg_streamed_and_not(
    replicas: UpProcess, through_smg: openai.OpenAI
) -> None:
    with Client(replicas.listen) as client:
        expected = ask(client, QUESTION)
    assert _text(through_smg) == expected
    stream = through_smg.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage is not None
    assert last.usage.completion_tokens == 8


def test_smg_stops_at_a_stop_string_and_names_what_is_wrong(through_smg: openai.OpenAI) -> None:
    answer = through_smg.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=8, temperature=0, stop=[" capital of"]
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("The", "stop")
    with pytest.raises(openai.BadRequestError, match=r"stopping.max_tokens: 5000 tokens .* exceed the limit, 256"):
        through_smg.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=5000)


def test_prompts_go_where_smg_was_told_that_they_are_cached(
    smg: str, through_smg: openai.OpenAI, smg_doors: list[str]
) -> None:
    """They came to the replicas by another way: SMG knows of them by events alone."""
    prompts = [f"{number} little mills stood by the river, and ground. " * 6 for number in range(2, 8)]
    for number, prompt in enumerate(prompts):
        _ask_replica(smg_doors[number % 2], prompt)
    for prompt in prompts:
        _assert_is_cached(through_smg, prompt)


def _ask_replica(door: str, prompt: str) -> None:
    params = vllm_engine_pb2.SamplingParams(max_tokens=1)
    request = vllm_engine_pb2.GenerateRequest(text=prompt, sampling_params=params)
    with grpc.insecure_channel(door) as channel:
        list(vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request, timeout=PATIENCE_S))


def _assert_is_cached(client: openai.OpenAI, prompt: str) -> None:
    usage = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) >= usage.prompt_tokens - 16 > 0


def test_client_that_leaves_ends_its_request(replicas: UpProcess, through_smg: openai.OpenAI) -> None:
    with _long_stream(through_smg) as stream:
        next(iter(stream))
    wait_until(lambda: _num_streams(replicas) == 0, "no stream is left at either replica")


def test_smg_serves_on_after_a_replicas_death_and_only_its_open_streams_fail(
    replicas: UpProcess, smg: str, through_smg: openai.OpenAI
) -> None:
    with _long_stream(through_smg) as stream:
        chunks = iter(stream)
        for _ in range(3):
            next(chunks)
        [index] = [index for index in range(2) if replicas.load(index).num_streams]
        os.kill(replicas.children()[f"detokenizer-{index}"], signal.SIGKILL)
        with pytest.raises(openai.APIError):
            list(chunks)
    for _ in range(4):
        assert "Paris" in _text(through_smg)
    wait_until(lambda: _num_healthy(smg) == 2, "the replica is back")


def _long_stream(client: openai.OpenAI) -> openai.Stream[openai.types.chat.ChatCompletionChunk]:
    return client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )


def _num_streams(replicas: UpProcess) -> int:
    return sum(replicas.load(index).num_streams for index in range(2))
