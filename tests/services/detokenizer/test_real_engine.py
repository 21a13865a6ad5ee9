"""A detokenizer process in front of a real engine process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import load_tokenizer
from kvern.v1 import inference_pb2, replica_pb2, replica_pb2_grpc
from tests.services.processes import running

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[replica_pb2_grpc.ReplicaServiceAsyncStub]:
    folder: Path = tmp_path_factory.mktemp("replica")
    address, engine = f"unix:{folder}/detokenizer.sock", f"unix:{folder}/engine.sock"
    async with (
        running("engine", "--listen", engine, "--num-blocks=40", "--max-model-len=512", log=folder / "engine"),
        running("detokenizer", "--listen", address, "--engine", engine, log=folder / "detokenizer"),
        open_channel(address) as channel,
    ):
        call = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True
        )
        async for response in call:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                break
        call.cancel()
        yield replica_pb2_grpc.ReplicaServiceStub(channel)


def request(text: str = PROMPT, **fields: Any) -> replica_pb2.ServeRequest:
    tokenizer = load_tokenizer(find_model("smollm2"))
    prompt = inference_pb2.TokenIds(ids=tokenizer.encode(text, add_special_tokens=False))
    generate = inference_pb2.GenerateRequest(token_ids=prompt, sampling=inference_pb2.Sampling(temperature=0), **fields)
    return replica_pb2.ServeRequest(request=generate)


async def test_real_answer_streams_to_its_end(replica: replica_pb2_grpc.ReplicaServiceAsyncStub) -> None:
    events = [
        inference_pb2.GenerateResponse.FromString(frame.client_frame)
        async for frame in replica.Serve(request(), timeout=60)
    ]
    assert [event.WhichOneof("event") for event in events[:2]] == ["started", "scheduled"]
    assert "Paris" in "".join(event.delta.text for event in events)
    assert "<|im_end|>" not in "".join(event.delta.text for event in events)
    finished = events[-1].finished
    assert finished.reason == inference_pb2.FINISH_REASON_STOP
    assert 0 < finished.timing.queue_s <= finished.timing.time_to_first_token_s <= finished.timing.total_s


async def test_call_cancelled_or_stopped_by_a_string_leaves_the_engine_empty(
    replica: replica_pb2_grpc.ReplicaServiceAsyncStub,
) -> None:
    """E01."""
    stopping = inference_pb2.Stopping(max_tokens=400, ignore_eos=True, stop=[" of"])
    stopped = [frame async for frame in replica.Serve(request(stopping=stopping), timeout=60)]
    assert inference_pb2.GenerateResponse.FromString(stopped[-1].client_frame).finished.stop == " of"
    long = inference_pb2.Stopping(max_tokens=400, ignore_eos=True)
    call = replica.Serve(request(stopping=long), timeout=60)
    for _ in range(7):
        await call.read()
    call.cancel()
    while True:
        load = (await replica.GetReplicaInfo(replica_pb2.GetReplicaInfoRequest(), timeout=10)).load
        if (load.num_streams, load.num_running, load.num_used_blocks) == (0, 0, 0):
            return


async def test_answer_under_a_schema_is_json_that_follows_it(
    replica: replica_pb2_grpc.ReplicaServiceAsyncStub,
) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    constraint = inference_pb2.Constraint(json_schema=json.dumps(schema | {"additionalProperties": False}))
    events = [
        inference_pb2.GenerateResponse.FromString(frame.client_frame)
        async for frame in replica.Serve(request(constraint=constraint), timeout=60)
    ]
    assert json.loads("".join(event.delta.text for event in events)) == {"city": "Paris"}
    assert events[-1].finished.reason == inference_pb2.FINISH_REASON_STOP


async def test_schema_that_cannot_be_done_is_refused_by_name(
    replica: replica_pb2_grpc.ReplicaServiceAsyncStub,
) -> None:
    call = replica.Serve(request(constraint=inference_pb2.Constraint(json_schema='{"not": {}}')), timeout=60)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        [frame async for frame in call]
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith("constraint.json_schema: cannot be compiled")


async def test_answer_with_all_that_can_be_asked_for_is_resumed_where_it_broke(
    replica: replica_pb2_grpc.ReplicaServiceAsyncStub,
) -> None:
    """A19, A22, C14: log-probabilities of prompt and output, and the prompt itself."""
    output = inference_pb2.Output(logprobs=2, prompt_logprobs=1, echo=True, token_ids=True)
    serve = request(output=output, stopping=inference_pb2.Stopping(max_tokens=12, ignore_eos=True))
    serve.request.sampling.seed = 7
    prompt = serve.request.token_ids.ids
    frames = [frame async for frame in replica.Serve(serve, timeout=60)]
    events = [inference_pb2.GenerateResponse.FromString(frame.client_frame) for frame in frames]
    told = [item for event in events for item in event.prompt_logprobs.items]
    assert [item.sampled.token_id for item in told] == prompt[1:]
    items = [item for event in events for item in event.delta.logprobs]
    assert all(item.sampled == item.top[0] for item in items)
    text = "".join(event.delta.text for event in events)
    echoed = text.removesuffix(b"".join(item.sampled.token for item in items).decode())
    assert echoed == PROMPT.replace("<|im_start|>", "").replace("<|im_end|>", "")

    received = frames[: len(frames) // 2]
    updates = [update for frame in received for update in frame.updates]
    had = [token_id for update in updates for token_id in update.new_token_ids]
    assert 0 < len(had) < 12
    serve.request.resume.seed = 7
    serve.request.resume.choices.add(token_ids=had, text_bytes=updates[-1].text_bytes_total)
    rest = [
        inference_pb2.GenerateResponse.FromString(frame.client_frame)
        async for frame in replica.Serve(serve, timeout=60)
    ]
    assert not any(event.HasField("prompt_logprobs") for event in rest)
    assert text.encode()[updates[-1].text_bytes_total :].decode() == "".join(event.delta.text for event in rest)
    after = [item.sampled.token_id for event in rest for item in event.delta.logprobs]
    assert had + after == [item.sampled.token_id for item in items]
    assert rest[-1].finished.usage.completion_tokens == 12
