"""Replicas die under load, and no client notices."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import grpc
import pytest

from kvern.client import AsyncClient, Delta, Event, Finished, GenerateOptions, KvernError, PromptLogprobs
from tests.up_process import PATIENCE_S, UpProcess

from .crowd import NUM_STREAMS, Crowd, prompts
from .fleet import NUM_REPLICAS, kill_amid_streams, wait_ready

pytestmark = pytest.mark.asyncio(loop_scope="module")


ENGINES = [f"engine-{index}" for index in range(NUM_REPLICAS)]
DETOKENIZERS = [f"detokenizer-{index}" for index in range(NUM_REPLICAS)]

KINDS: tuple[GenerateOptions, ...] = (
    {"seed": 5, "n": 2, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "logprobs": 1, "token_ids": True},
    {"seed": 6, "regex": "[a-z]+( [a-z]+){40}", "logit_bias": {260: 2.0}},
    {"temperature": 0.0, "echo": True, "prompt_logprobs": 0, "stop": ["river", "\n\n\n"], "min_tokens": 8},
)
"""What has state to be carried over: draws, penalties, a grammar, an echo, a search for stop strings."""


async def test_requests_of_every_kind_go_on_elsewhere_exactly(replicas: UpProcess, fleet_client: AsyncClient) -> None:
    await wait_ready(fleet_client)
    whole = await asyncio.gather(*(_collect(fleet_client, kind) for kind in KINDS))
    is_killed = False
    while not is_killed:
        half_way = asyncio.Event()
        running = [asyncio.create_task(_collect(fleet_client, kind, half_way)) for kind in KINDS]
        await half_way.wait()
        is_killed = kill_amid_streams(replicas, ENGINES)
        survived = await asyncio.gather(*running)
        assert survived == whole
    assert sum(answer.num_moves for answer in survived) > 0


async def test_killed_detokenizer_breaks_no_stream(
    replicas: UpProcess, fleet_client: AsyncClient, undisturbed: list[str]
) -> None:
    assert await _bereaved(fleet_client, replicas, DETOKENIZERS) == undisturbed


async def test_killed_engine_breaks_none_of_a_hundred_streams(replicas: UpProcess, fleet_client: AsyncClient) -> None:
    await wait_ready(fleet_client)
    undisturbed = await Crowd(fleet_client, 100).run()
    assert await _bereaved(fleet_client, replicas, ENGINES, 100) == undisturbed


async def test_engines_killed_one_after_another_lose_no_stream(
    replicas: UpProcess, fleet_client: AsyncClient, undisturbed: list[str]
) -> None:
    for engine in ENGINES:
        assert await _bereaved(fleet_client, replicas, [engine]) == undisturbed


async def test_terminated_engine_ends_its_streams_or_hands_them_on(
    replicas: UpProcess, fleet_client: AsyncClient, undisturbed: list[str]
) -> None:
    """E13, of an engine alone. Rolling upgrades end whole replicas."""
    await wait_ready(fleet_client)
    crowd = Crowd(fleet_client)
    running = asyncio.create_task(crowd.run())
    await crowd.under_way.wait()
    os.kill(replicas.children()["engine-2"], signal.SIGTERM)
    assert await running == undisturbed


async def test_request_that_brings_down_its_engine_is_poison_for_two_and_no_more(
    replicas: UpProcess, fleet_client: AsyncClient
) -> None:
    """Engines stand still, so that it is known which one has the request when it dies."""
    await wait_ready(fleet_client)
    engines = {name: pid for name, pid in replicas.children().items() if name.startswith("engine-")}
    for pid in engines.values():
        os.kill(pid, signal.SIGSTOP)
    try:
        call = asyncio.create_task(_read(fleet_client, "A poison"))
        for _ in range(2):
            os.kill(engines.pop(await _engine_with_a_stream(replicas, engines)), signal.SIGKILL)
        with pytest.raises(KvernError) as ended:
            await call
    finally:
        for pid in engines.values():
            os.kill(pid, signal.SIGCONT)
    assert (ended.value.code, ended.value.reason) == (grpc.StatusCode.INTERNAL, "POISON")
    await wait_ready(fleet_client)
    assert engines.items() < replicas.children().items()


@dataclass
class Answer:
    """All of an answer that must not depend on who served it."""

    events: list[str] = field(default_factory=list)
    text: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    prompt_logprobs: list[float] = field(default_factory=list)
    ends: dict[int, tuple[object, ...]] = field(default_factory=dict)
    num_moves: int = field(default=0, compare=False)

    def take(self, event: Event) -> None:
        match event:
            case Delta():
                self.text[event.index] = self.text.get(event.index, "") + event.text
                self.token_ids.setdefault(event.index, []).extend(event.token_ids)
                values = [round(item.sampled.logprob, 3) for item in event.logprobs]
                self.logprobs.setdefault(event.index, []).extend(values)
            case PromptLogprobs():
                self.prompt_logprobs += [round(item.sampled.logprob, 3) for item in event.items]
            case Finished():
                usage = event.usage
                self.ends[event.index] = event.reason, event.stop, usage.prompt_tokens, usage.completion_tokens
                self.num_moves = event.timing.migrations
            case _:
                self.events.append(type(event).__name__)


async def _collect(client: AsyncClient, kind: GenerateOptions, half_way: asyncio.Event | None = None) -> Answer:
    answer = Answer()
    async for event in client.generate(prompts(1)[0], max_tokens=48, ignore_eos=True, timeout_s=PATIENCE_S, **kind):
        answer.take(event)
        if half_way is not None and len("".join(answer.text.values())) > 80:
            half_way.set()
    return answer


async def _bereaved(
    client: AsyncClient, replicas: UpProcess, names: Sequence[str], num_streams: int = NUM_STREAMS
) -> list[str]:
    """Return what a crowd gets while one of the services named is killed under its streams."""
    is_killed = False
    while not is_killed:
        await wait_ready(client)
        crowd = Crowd(client, num_streams)
        running = asyncio.create_task(crowd.run())
        await crowd.under_way.wait()
        is_killed = kill_amid_streams(replicas, names)
        texts = await running
    assert crowd.num_moves > 0
    return texts


async def _read(client: AsyncClient, prompt: str) -> None:
    async for _ in client.generate(prompt, max_tokens=8, timeout_s=PATIENCE_S):
        pass


async def _engine_with_a_stream(replicas: UpProcess, names: Iterable[str]) -> str:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for name in names:
                if replicas.load(int(name.removeprefix("engine-"))).num_streams:
                    return name
            await asyncio.sleep(0.02)
