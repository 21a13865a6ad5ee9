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
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import load_tokenizer
from kvern.v1 import inference_pb2, replica_pb2, replica_pb2_grpc
from tests.services.processes import running
from tests.up_process import free_port

from .setup import TIMEOUT_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

SALT = "gate"
"""Of what comes by SMG's door."""

BLOCK_SIZE = 16

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def smg_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(
    tmp_path_factory: pytest.TempPathFactory, smg_address: str
) -> AsyncIterator[replica_pb2_grpc.ReplicaServiceAsyncStub]:
    folder: Path = tmp_path_factory.mktemp("replica")
    address, engine = f"unix:{folder}/detokenizer.sock", f"unix:{folder}/engine.sock"
    smg = ["--smg-kv-events", f"--smg-salt={SALT}"]
    engine_flags = ["--listen", engine, "--num-blocks=40", "--max-model-len=512", *smg]
    flags = ["--listen", address, "--engine", engine, "--smg-listen", smg_address, *smg]
    async with (
        running("engine", *engine_flags, log=folder / "engine"),
        running("detokenizer", *flags, log=folder / "detokenizer"),
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

    updates = [update for frame in frames for update in frame.updates]
    ids = [token_id for update in updates for token_id in update.new_token_ids]
    assert ids == [item.sampled.token_id for item in items]
    assert updates[-1].text_bytes_total == len(text.encode())
    # How many tokens a frame has is a matter of timing: the stream breaks where one might have ended.
    had, text_bytes = ids[:6], len(echoed.encode() + b"".join(item.sampled.token for item in items[:6]))
    serve.request.resume.seed = 7
    serve.request.resume.choices.add(token_ids=had, text_bytes=text_bytes)
    rest = [
        inference_pb2.GenerateResponse.FromString(frame.client_frame)
        async for frame in replica.Serve(serve, timeout=60)
    ]
    assert not any(event.HasField("prompt_logprobs") for event in rest)
    assert text.encode()[text_bytes:].decode() == "".join(event.delta.text for event in rest)
    after = [item.sampled.token_id for event in rest for item in event.delta.logprobs]
    assert had + after == ids
    assert rest[-1].finished.usage.completion_tokens == 12


@pytest_asyncio.fixture(loop_scope="module")
async def smg(replica: replica_pb2_grpc.ReplicaServiceAsyncStub, smg_address: str) -> AsyncIterator[Any]:
    """A stub to SMG's door."""
    async with open_channel(smg_address) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


class KnownBlocks:
    """What SMG would know of the replica's cache. Nothing may be told of blocks whose parents it does not know."""

    def __init__(self, smg: Any, start: int = 0) -> None:
        self._call = smg.SubscribeKvEvents(
            common_pb2.SubscribeKvEventsRequest(start_sequence_number=start), timeout=TIMEOUT_S
        )
        self._batches = aiter(self._call)
        self.prompts: dict[int, list[int]] = {}
        """All tokens up to a block's end, by its hash."""
        self.sequence = start
        self.num_snapshots = 0

    async def ready(self) -> None:
        """Wait for what SMG waits for before it goes on."""
        await self._call.initial_metadata()

    async def hear(self) -> None:
        """Apply one batch."""
        batch = await anext(self._batches)
        self.sequence = batch.sequence_number
        for event in batch.events:
            if event.HasField("cleared"):
                self.num_snapshots += 1
                self.prompts.clear()
            elif event.HasField("stored"):
                self._store(event.stored)
            else:
                for block_hash in event.removed.block_hashes:
                    del self.prompts[block_hash]

    async def hear_of(self, prompt: list[int]) -> None:
        """Go on until all full blocks of a prompt are known."""
        blocks = [prompt[:end] for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)]
        while not all(block in self.prompts.values() for block in blocks):
            await self.hear()

    def cancel(self) -> None:
        self._call.cancel()

    def _store(self, stored: Any) -> None:
        prompt = self.prompts[stored.parent_block_hash] if stored.HasField("parent_block_hash") else []
        for block in stored.blocks:
            assert block.block_size == len(block.token_ids) == BLOCK_SIZE
            prompt = [*prompt, *block.token_ids]
            self.prompts[block.block_hash] = prompt


async def ask_smg(smg: Any, prompt: list[int]) -> Any:
    """Return the one message of an answer that is not streamed."""
    call = smg.Generate(
        vllm_engine_pb2.GenerateRequest(
            request_id=str(prompt[:2]),
            tokenized=vllm_engine_pb2.TokenizedInput(input_ids=prompt),
            sampling_params=vllm_engine_pb2.SamplingParams(temperature=0, max_tokens=2),
        ),
        timeout=TIMEOUT_S,
    )
    [response] = [each async for each in call]
    return response.complete


async def test_smg_hears_of_blocks_that_its_requests_can_share_and_of_no_others(
    replica: replica_pb2_grpc.ReplicaServiceAsyncStub, smg: Any
) -> None:
    """Routers' requests have other salts: their tokens are nobody else's business."""
    known, prompt = KnownBlocks(smg), [300 + number for number in range(40)]
    await known.ready()
    others = request("Nobody else's prompt, which is as long as some blocks. " * 4)
    others.request.stopping.max_tokens = 2
    async for _ in replica.Serve(others, timeout=60):
        pass
    assert (await ask_smg(smg, prompt)).cached_tokens == 0
    await known.hear_of(prompt)
    assert sorted(map(len, known.prompts.values())) == [16, 32]
    assert (await ask_smg(smg, prompt)).cached_tokens == 32
    known.cancel()


async def test_subscriber_that_comes_back_hears_what_it_missed_and_one_that_was_away_too_long_everything(
    smg: Any,
) -> None:
    """The cursor is the last batch that was heard, which may come once more."""
    known = KnownBlocks(smg)
    await known.hear()
    known.cancel()
    missed = [[1000 * number + place for place in range(20)] for number in (1, 2)]
    for prompt in missed:
        await ask_smg(smg, prompt)
    again = KnownBlocks(smg, known.sequence + 1)
    for prompt in missed:
        await again.hear_of(prompt)
    assert (again.num_snapshots, len(again.prompts)) == (0, 2)
    anew = KnownBlocks(smg, 5)
    await anew.hear_of(missed[1])
    assert anew.num_snapshots == 1
    assert {tuple(each) for each in again.prompts.values()} <= {tuple(each) for each in anew.prompts.values()}
    again.cancel()
    anew.cancel()


async def test_evicted_blocks_are_taken_back(smg: Any) -> None:
    known, prompts = KnownBlocks(smg), [[100 * number + place for place in range(90)] for number in range(10, 19)]
    for prompt in prompts:
        await ask_smg(smg, prompt)
        await known.hear_of(prompt)
    assert prompts[0][:BLOCK_SIZE] not in known.prompts.values()
    assert len(known.prompts) <= 40
    fresh = KnownBlocks(smg)
    await fresh.hear()
    assert fresh.prompts == known.prompts
    known.cancel()
    fresh.cancel()
