from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.services.runtime.channel import open_channel
from kvern.v1 import engine_pb2, engine_pb2_grpc, inference_pb2
from tests.up_process import PATIENCE_S

COMMAND = [sys.executable, "-m", "kvern.services.engine", "--log-format", "json"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    socket = f"unix:{tmp_path_factory.mktemp('engine')}/engine.sock"
    flags = ["--listen", socket, "--num-blocks", "40", "--max-model-len", "512", "--drain-delay-s", "0"]
    process = subprocess.Popen([*COMMAND, *flags], stderr=subprocess.PIPE, text=True)
    try:
        asyncio.run(wait_until_serving(socket))
        yield socket
    finally:
        process.terminate()
        _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, log


async def wait_until_serving(address: str) -> None:
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        async for response in stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=PATIENCE_S):
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return


class Connection:
    def __init__(self, call: grpc.aio.StreamStreamCall[engine_pb2.ConnectRequest, engine_pb2.ConnectResponse]) -> None:
        self.call = call
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, engine_pb2.ChoiceEnd] = {}
        self.choices_ended: list[engine_pb2.ChoiceEnd] = []
        self.cached: dict[int, int] = {}
        self.load = engine_pb2.StepOutput().load
        self.logprobs: list[engine_pb2.EngineTokenLogprobs] = []
        self.prompt_logprobs: list[engine_pb2.EnginePromptLogprobs] = []

    async def add(
        self,
        number: int,
        prompt: list[int],
        max_tokens: int,
        constraint: inference_pb2.Constraint | None = None,
        **sampling: float,
    ) -> None:
        await self.send(
            id=number,
            prompt_token_ids=prompt,
            sampling=inference_pb2.Sampling(**sampling),  # type: ignore[arg-type]
            stopping=inference_pb2.Stopping(max_tokens=max_tokens, ignore_eos=True),
            constraint=constraint,
        )

    async def send(self, **fields: Any) -> None:
        await self.call.write(engine_pb2.ConnectRequest(add=engine_pb2.AddRequest(**fields)))

    async def abort(self, number: int) -> None:
        await self.call.write(engine_pb2.ConnectRequest(abort=engine_pb2.AbortRequest(id=number)))

    async def park(self, number: int) -> None:
        await self.call.write(engine_pb2.ConnectRequest(park=engine_pb2.ParkRequest(id=number)))

    async def unpark(self, number: int) -> None:
        await self.call.write(engine_pb2.ConnectRequest(unpark=engine_pb2.UnparkRequest(id=number)))

    async def read(self) -> engine_pb2.StepOutput:
        message = await self.call.read()
        assert message is not grpc.aio.EOF
        step = message.step
        self.logprobs += step.logprobs
        self.prompt_logprobs += step.prompt_logprobs
        for number, token in zip(step.ids, step.token_ids, strict=True):
            self.tokens.setdefault(number, []).append(token)
        self.choices_ended.extend(step.ended)
        self.ended.update({ended.id: ended for ended in step.ended})
        self.cached.update({scheduled.id: scheduled.cached_tokens for scheduled in step.scheduled})
        self.load = step.load
        return step

    async def read_choices(self, number: int, count: int) -> dict[int, list[int]]:
        """Read a request's tokens by choice, until that many of its choices have ended."""
        tokens: dict[int, list[int]] = {}
        while sum(ended.id == number for ended in self.choices_ended) < count:
            step = await self.read()
            for request_id, choice, token_id in zip(
                step.ids, step.choices or [0] * len(step.ids), step.token_ids, strict=True
            ):
                if request_id == number:
                    tokens.setdefault(choice, []).append(token_id)
        return tokens

    async def read_until_ended(self, *numbers: int) -> None:
        while not self.ended.keys() >= set(numbers):
            await self.read()


@asynccontextmanager
async def connect(address: str) -> AsyncIterator[tuple[Connection, engine_pb2.Hello]]:
    async with open_channel(address) as channel:
        call = engine_pb2_grpc.EngineServiceStub(channel).Connect(wait_for_ready=True)
        try:
            hello = await call.read()
            yield Connection(call), hello.hello
        finally:
            call.cancel()


async def test_connect_says_hello_with_what_the_engine_is(address: str) -> None:
    async with connect(address) as (_, hello):
        info = hello.info
    assert (info.model, info.block_size, info.num_blocks, info.max_model_len) == ("smollm2", 16, 40, 512)
    assert (info.vocab_size, info.dtype, info.device) == (49152, "float32", "cpu")
    assert 2 in info.eos_token_ids
    assert len(info.contract) == 32
    assert info.kv_bytes == 40 * 16 * 30 * 2 * 3 * 64 * 4


async def test_requests_on_one_stream_run_together_and_each_ends(address: str) -> None:
    async with connect(address) as (connection, _):
        for number in range(8):
            await connection.add(number, [100 + number, 200, 300], 12, temperature=0)
        await connection.read_until_ended(*range(8))
    assert {len(tokens) for tokens in connection.tokens.values()} == {12}
    assert {ended.reason for ended in connection.ended.values()} == {inference_pb2.FINISH_REASON_LENGTH}
    assert (connection.load.num_running, connection.load.num_used_blocks) == (0, 0)


async def test_second_request_with_the_same_prompt_reports_cached_tokens_and_the_same_output(address: str) -> None:
    prompt = list(range(1000, 1200))
    async with connect(address) as (connection, _):
        await connection.add(1, prompt, 8, temperature=0)
        await connection.read_until_ended(1)
        await connection.add(2, prompt, 8, temperature=0)
        await connection.read_until_ended(2)
    assert (connection.cached[1], connection.cached[2]) == (0, 192)
    assert connection.tokens[1] == connection.tokens[2]


async def test_resumed_choices_give_what_the_broken_stream_had_left(address: str) -> None:
    prompt = list(range(2000, 2040))
    whole = inference_pb2.Sampling(n=3, seed=11)
    stopping = inference_pb2.Stopping(max_tokens=12, ignore_eos=True)
    async with connect(address) as (connection, _):
        await connection.send(id=1, prompt_token_ids=prompt, sampling=whole, stopping=stopping)
        tokens = await connection.read_choices(1, 3)
        resumed = [
            engine_pb2.ResumedChoice(index=index, token_ids=tokens[index][:had]) for index, had in ((0, 5), (2, 11))
        ]
        await connection.send(id=2, prompt_token_ids=prompt, sampling=whole, stopping=stopping, resumed=resumed)
        rest = await connection.read_choices(2, 2)
    assert rest == {0: tokens[0][5:], 2: tokens[2][11:]}


async def test_parked_request_waits_for_unpark_while_others_run(address: str) -> None:
    async with connect(address) as (connection, _):
        await connection.add(1, [5, 6], 400, temperature=0)
        while 1 not in connection.tokens:
            await connection.read()
        await connection.park(1)
        await connection.add(2, [7, 8], 12, temperature=0)
        await connection.read_until_ended(2)
        assert 1 not in connection.ended
        assert connection.load.num_running == 0
        more = len(connection.tokens[1]) + 4
        await connection.unpark(1)
        while len(connection.tokens[1]) < more:
            await connection.read()
        await connection.add(3, [5, 6], more, temperature=0)
        await connection.read_until_ended(3)
    assert connection.tokens[1][:more] == connection.tokens[3]


async def test_same_seed_same_tokens_and_another_seed_others(address: str) -> None:
    async with connect(address) as (connection, _):
        for number, seed in enumerate([7, 7, 8]):
            await connection.add(number, [100, 200, 300], 16, temperature=1.0, seed=seed)
        await connection.read_until_ended(0, 1, 2)
    assert connection.tokens[0] == connection.tokens[1] != connection.tokens[2]


async def test_logprobs_come_with_the_tokens_and_those_of_the_prompt_once(address: str) -> None:
    """Greedy: each token is the likeliest. A prompt that repeats itself becomes likely."""
    prompt = [500, 600, 700] * 100
    greedy, stopping = inference_pb2.Sampling(temperature=0), inference_pb2.Stopping(max_tokens=6, ignore_eos=True)
    async with connect(address) as (connection, _):
        await connection.send(
            id=1, prompt_token_ids=prompt, sampling=greedy, stopping=stopping, logprobs=2, prompt_logprobs=0
        )
        await connection.add(2, prompt, 6, temperature=0)
        await connection.read_until_ended(1, 2)
    assert [each.rank for each in connection.logprobs] == [1] * 6
    assert [each.top_ids[0] for each in connection.logprobs] == connection.tokens[1]
    assert {len(each.top_logprobs) for each in connection.logprobs} == {2}
    items = [item for piece in connection.prompt_logprobs for item in piece.items]
    assert (connection.prompt_logprobs[0].id, connection.prompt_logprobs[0].start, len(items)) == (1, 1, 299)
    assert max(item.rank for item in items[-100:]) <= 3


async def test_abort_frees_blocks_and_unknown_ids_are_ignored(address: str) -> None:
    """E01."""
    async with connect(address) as (connection, _):
        await connection.abort(99)
        await connection.add(1, [5] * 40, 400)
        while 1 not in connection.tokens:
            await connection.read()
        await connection.abort(1)
        while connection.load.num_used_blocks:
            await connection.read()
    assert 0 < len(connection.tokens[1]) < 400
    assert connection.ended == {}


async def test_end_of_a_stream_aborts_its_requests(address: str) -> None:
    async with connect(address) as (connection, _):
        await connection.add(1, [5] * 40, 400)
        await connection.read()
    async with connect(address) as (connection, _):
        await connection.add(1, [7], 1)
        await connection.read_until_ended(1)
        while connection.load.num_used_blocks:
            await connection.read()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"),
    [
        ([], 4, "token_ids"),
        ([5, 49152], 4, "token_ids"),
        ([5, 2**32 - 1], 4, "token_ids"),
        ([5] * 510, 3, "stopping.max_tokens"),
    ],
)
async def test_request_that_cannot_run_is_refused_and_its_neighbour_unmoved(
    address: str, prompt: list[int], max_tokens: int, field: str
) -> None:
    """B09."""
    async with connect(address) as (connection, _):
        await connection.add(1, [100, 200, 300], 6, temperature=0)
        await connection.add(2, prompt, max_tokens)
        await connection.add(3, [100, 200, 300], 6, temperature=0)
        await connection.read_until_ended(1, 2, 3)
    assert connection.ended[2].refusal.field == field
    assert 2 not in connection.tokens
    assert connection.tokens[1] == connection.tokens[3]
    assert len(connection.tokens[1]) == 6


async def test_constrained_request_ends_with_its_grammar_in_every_choice(address: str) -> None:
    constraint = inference_pb2.Constraint(choices=inference_pb2.Choices(values=["yes", "no", "maybe"]))
    async with connect(address) as (connection, _):
        await connection.add(1, [100, 200, 300], 20, constraint, n=3)
        while len(connection.choices_ended) < 3:
            await connection.read()
    assert {ended.reason for ended in connection.choices_ended} == {inference_pb2.FINISH_REASON_STOP}
    assert {ended.index for ended in connection.choices_ended} == {0, 1, 2}


async def test_constraint_that_cannot_be_compiled_is_refused_and_its_neighbour_unmoved(address: str) -> None:
    async with connect(address) as (connection, _):
        await connection.add(1, [100, 200, 300], 6, temperature=0)
        await connection.add(2, [100, 200, 300], 6, inference_pb2.Constraint(json_schema='{"not": {}}'), n=2)
        await connection.add(3, [100, 200, 300], 6, temperature=0)
        await connection.read_until_ended(1, 2, 3)
    assert connection.ended[2].refusal.field == "constraint.json_schema"
    assert 'Unimplemented keys: ["not"]' in connection.ended[2].refusal.message
    assert 2 not in connection.tokens
    assert connection.tokens[1] == connection.tokens[3]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--model", "/nowhere/at/all"], 1, "/nowhere/at/all"),
        (["--max-model-len", "100000"], 1, "max_model_len"),
        (["--num-blocks", "8", "--max-model-len", "512"], 1, "max_model_len"),
        (["--max-num-seqs", "0"], 2, "max_num_seqs"),
        (["--kv-cache-memory", "lots"], 2, "kv_cache_memory"),
    ],
)
def test_start_with_a_wrong_setting_says_which_and_ends(
    tmp_path: Path, flags: list[str], code: int, message: str
) -> None:
    command = [*COMMAND, "--listen", f"unix:{tmp_path}/engine.sock", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == code
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
