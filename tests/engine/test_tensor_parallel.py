"""A whole engine on two ranks, over gloo: the same tokens as on one, and a clear end when a rank is gone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

from kvern.engine.config import EngineConfig
from kvern.engine.core import Add, EngineCore, Output, Stop
from kvern.engine.errors import ConfigError, RankLost
from kvern.engine.plan import Plan, PlanEntry, StepResult
from kvern.engine.request import CacheParams, Request, SamplingParams, StoppingParams
from kvern.engine.startup import Engine, start_engine
from kvern.engine.tensor_parallel.messages import PlanWriter
from kvern.services.engine.engine_thread import EngineThread

from .engine_harness import GREEDY, EngineHarness, Outcome
from .plain_model import PlainGrammar
from .tiny_models import PROMPT, save_tiny

NUM_TOKENS = 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grouped queries, a vocabulary that two do not share evenly, experts in one layer."""
    path = tmp_path_factory.mktemp("shared")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0, 2]}
    save_tiny(path, "Qwen3Moe", head_dim=12, **experts)
    return path


def config(path: Path, num_ranks: int) -> EngineConfig:
    return EngineConfig(
        path,
        device="cpu",
        dtype="float32",
        tensor_parallel_size=num_ranks,
        max_num_seqs=4,
        max_num_batched_tokens=13,
        block_size=4,
        num_blocks=14,
        max_model_len=56,
        num_threads=1,
    )


@contextmanager
def started(path: Path, num_ranks: int) -> Iterator[Engine]:
    before = torch.get_num_threads()
    engine = start_engine(config(path, num_ranks))
    try:
        yield engine
    finally:
        engine.close()
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(path: Path) -> Iterator[EngineHarness]:
    with started(path, 1) as engine:
        yield EngineHarness(engine)


@pytest.fixture(scope="module")
def shared(path: Path) -> Iterator[EngineHarness]:
    with started(path, 2) as engine:
        yield EngineHarness(engine)


SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=0, logprobs=2, repetition_penalty=1.3),
    SamplingParams(temperature=0, bad_words=((5,), (7, 8)), logit_bias={3: 1.5}),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=2**63 + 1),
)


def run_all(harness: EngineHarness) -> list[Outcome]:
    """Run more requests than there are blocks for, in chunks; then some again, from the cache; then a fork."""
    outcomes = [
        harness.add(PROMPT[: 20 + 3 * number], NUM_TOKENS, sampling, prompt_logprobs=1 if number == 1 else None)
        for number, sampling in enumerate(SAMPLINGS)
    ]
    grammar = PlainGrammar(6)
    outcomes.append(harness.add(PROMPT[3:9], 6, grammar=grammar))
    harness.run()
    outcomes += [harness.add(PROMPT[:22], NUM_TOKENS), harness.add(PROMPT, 5, cache=CacheParams(salt="other"))]
    harness.run()
    first = harness.add(PROMPT[7:25], NUM_TOKENS)
    fork = harness.add(
        PROMPT[7:25], NUM_TOKENS, SAMPLINGS[3], choice=1, arrival=first.request.arrival, fork_of=first.request
    )
    harness.run()
    return [*outcomes, first, fork]


def test_tokens_of_two_ranks_are_those_of_one(alone: EngineHarness, shared: EngineHarness) -> None:
    """Chunks, preemption, prefix hits, a grammar, drawn tokens, penalties, log-probabilities, and a fork."""
    expected, actual = run_all(alone), run_all(shared)
    assert [outcome.token_ids for outcome in actual] == [outcome.token_ids for outcome in expected]
    assert shared.num_preemptions == alone.num_preemptions > 0
    assert actual[5].request.num_cached_tokens == expected[5].request.num_cached_tokens == 20
    assert all(outcome.ended is not None and not outcome.ended.error for outcome in actual)
    assert set(actual[1].prompt_logprobs) == set(range(1, 23))
    told, should = ([*one.logprobs, *one.prompt_logprobs.values()] for one in (actual[1], expected[1]))
    for ours, theirs in zip(told, should, strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def run_core(engine: Engine, depth: int) -> dict[int, list[int]]:
    """Run requests through the core's loop, with a step in flight at depth 1. Returns their tokens."""
    core = EngineCore(engine.scheduler, engine.runner, depth=depth)
    tokens: dict[int, list[int]] = {1000 + number: [] for number in range(len(SAMPLINGS) + 1)}
    still_running = set(tokens)

    def emit(output: Output) -> None:
        assert isinstance(output, StepResult)
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            tokens[request_id].append(token_id)
        still_running.difference_update(ended.request_id for ended in output.ended)
        if not still_running:
            core.send(Stop())

    stopping = StoppingParams(NUM_TOKENS, ignore_eos=True)
    for number, (request_id, sampling) in enumerate(zip(tokens, (*SAMPLINGS, GREEDY), strict=True)):
        grammar = PlainGrammar(NUM_TOKENS) if number == len(SAMPLINGS) else None
        prompt = PROMPT[number : 15 + 2 * number]
        core.send(Add(Request(request_id, prompt, len(prompt), sampling, stopping, arrival=number, grammar=grammar)))
    core.run(emit)
    return tokens


def test_tokens_of_two_ranks_with_a_step_in_flight_are_those_of_one_without(
    alone: EngineHarness, shared: EngineHarness
) -> None:
    assert run_core(shared.engine, depth=1) == run_core(alone.engine, depth=0)


def test_contract_of_two_ranks_is_that_of_one(alone: EngineHarness, shared: EngineHarness) -> None:
    assert shared.engine.contract == alone.engine.contract


def test_each_of_two_ranks_holds_half_of_the_kv(alone: EngineHarness, shared: EngineHarness) -> None:
    whole, half = alone.engine.capacity, shared.engine.capacity
    assert (half.num_blocks, 2 * half.kv_bytes) == (whole.num_blocks, whole.kv_bytes)
    assert 0.5 * whole.weight_bytes < half.weight_bytes < 0.75 * whole.weight_bytes
    assert "rank 0 of 2 that hold as much each" in half.memory_lines()[1]


def other_ranks() -> list[int]:
    """Return the process ids of this process's children that are ranks."""
    ranks = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone by now
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and b"tensor_parallel.worker" in (process / "cmdline").read_bytes():
                ranks.append(int(process.name))
    return ranks


def kill_other_rank() -> None:
    [pid] = other_ranks()
    os.kill(pid, signal.SIGKILL)


def test_engine_whose_other_rank_is_killed_in_a_step_says_which_and_how(shared: EngineHarness) -> None:
    """E12: a rank is a Python of its own, by its command line. The last test that may use `shared`."""
    shared.add(PROMPT, NUM_TOKENS)
    shared.step()
    kill_other_rank()
    with pytest.raises(RankLost, match="rank 1 of 2 was killed by SIGKILL") as raised:
        shared.run()
    assert raised.value.rank == 1
    shared.engine.close()


async def test_idle_engine_whose_other_rank_is_killed_ends_with_the_reason(path: Path) -> None:
    thread = EngineThread(config(path, 2), lambda output: None)
    thread.start()
    await thread.loaded
    kill_other_rank()
    with pytest.raises(RankLost, match="rank 1 of 2 was killed by SIGKILL"):
        await asyncio.wait_for(thread.ended, 30)
    await thread.stop()


def test_engine_that_cannot_load_leaves_no_rank_behind(smollm2_path: Path) -> None:
    """I09, on real weights."""
    with pytest.raises(ConfigError, match=r"9 heads, 3 KV heads .* sizes that can are 1, 3$"):
        start_engine(EngineConfig(smollm2_path, device="cpu", tensor_parallel_size=2))
    assert other_ranks() == []


def test_message_of_a_step_that_decodes_is_two_dozen_bytes_a_request() -> None:
    writer = PlanWriter()
    stopping = StoppingParams(max_tokens=1000)
    requests = [Request(number, [0] * 900, 900, GREEDY, stopping) for number in range(300, 364)]
    for request in requests:
        request.block_ids = list(range(100))
    writer.write(Plan([PlanEntry(request, 0, 900, samples=True) for request in requests]))
    for request in requests:
        request.first_changed_block = len(request.block_ids)
    message = writer.write(Plan([PlanEntry(request, 900, 1, samples=True) for request in requests]))
    assert len(ForkingPickler.dumps(message)) < 24 * len(requests) + 300
