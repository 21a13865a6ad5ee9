"""What an engine process tells on /metrics of the requests it was given."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from itertools import pairwise

import httpx
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvern.engine.core import Add
from kvern.engine.plan import StepResult
from kvern.services.engine.metrics import EngineMetrics
from kvern.v1 import engine_pb2, inference_pb2
from tests.engine.test_core import make_core, make_request
from tests.engine.test_core import running as core_running
from tests.engine.tiny_llama import VOCAB_SIZE, save_tiny
from tests.services.processes import running
from tests.up_process import free_port

from .test_engine_service import connect

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHUNK = 16
PROMPT_LEN = 3 * CHUNK
MAX_MODEL_LEN = 4096
NUM_BLOCKS = 2048
TIMEOUT_S = 60.0

Scrape = Mapping[str, float]


class Process:
    def __init__(self, address: str, http: httpx.AsyncClient) -> None:
        self.address = address
        self._http = http

    async def text(self) -> str:
        return (await self._http.get("/metrics")).text

    async def scrape(self) -> Scrape:
        """Return the value of each series, and of each sample's name summed over its series."""
        values: Counter[str] = Counter()
        for family in text_string_to_metric_families(await self.text()):
            for sample in family.samples:
                labels = {key: value for key, value in sample.labels.items() if key not in ("model", "le")}
                if "le" not in sample.labels:
                    values[sample.name] += sample.value
                    if labels:
                        values[f"{sample.name}{labels}"] += sample.value
        return values


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Process]:
    folder = tmp_path_factory.mktemp("engine")
    address, status_address = f"unix:{folder}/engine.sock", f"127.0.0.1:{free_port()}"
    save_tiny(folder / "model", max_position_embeddings=MAX_MODEL_LEN)
    flags = ["--listen", address, "--status-listen", status_address, "--num-threads", "1"]
    flags += ["--model", str(folder / "model"), "--served-model-name", "tiny"]
    flags += ["--num-blocks", str(NUM_BLOCKS), "--max-num-batched-tokens", str(CHUNK)]
    async with (
        running("engine", *flags, log=folder / "log"),
        connect(address),
        httpx.AsyncClient(base_url=f"http://{status_address}", timeout=TIMEOUT_S) as http,
    ):
        yield Process(address, http)


def grown(before: Scrape, after: Scrape, name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


async def test_prompts_in_chunks_have_one_first_token_each(process: Process) -> None:
    """H04. Times count from the front door's stamp, here an hour ago."""
    before = await process.scrape()
    async with connect(process.address) as (connection, _):
        for number in range(20):
            await connection.add(number, [(number + i * i) % VOCAB_SIZE for i in range(PROMPT_LEN)], 2, temperature=0)
        await connection.read_until_ended(*range(20))
    after = await process.scrape()
    for name in ("time_to_first_token", "queue", "prefill", "decode", "inference", "request_duration"):
        assert grown(before, after, f"kvern_engine_{name}_seconds_count") == 20, name
    assert grown(before, after, "kvern_engine_inter_token_latency_seconds_count") == 20
    assert grown(before, after, "kvern_engine_prompt_tokens_total") == 20 * PROMPT_LEN
    assert grown(before, after, "kvern_engine_generated_tokens_total") == 40
    assert grown(before, after, "kvern_engine_step_sequences_count") >= 60
    assert after["kvern_engine_choices_total{'reason': 'length'}"] >= 20
    # Each is a part of a step, and none is counted twice.
    phases = {
        phase: grown(before, after, f"kvern_engine_step_phase_seconds_sum{{'phase': '{phase}'}}")
        for phase in ("commands", "schedule", "prepare", "forward", "sample", "commit", "emit")
    }
    assert all(phases.values())
    assert sum(phases.values()) < 1.5 * grown(before, after, "kvern_engine_step_seconds_sum")


async def test_aborts_are_counted_once_and_as_aborts(process: Process) -> None:
    """H02: three by their client, two as the stream breaks; a choice that came to a stop string is none."""
    before = await process.scrape()
    async with connect(process.address) as (connection, _):
        for number in range(6):
            await connection.add(number, [number, 20], MAX_MODEL_LEN - 2)
        while len(connection.tokens) < 6:
            await connection.read()
        for number in range(3):
            await connection.abort(number)
        stopped = engine_pb2.AbortRequest(id=5, choice=0)
        await connection.call.write(engine_pb2.ConnectRequest(abort=stopped))
        await connection.add(7, [8, 9], 1)
        await connection.read_until_ended(7)
    async with asyncio.timeout(TIMEOUT_S):
        while grown(before, after := await process.scrape(), "kvern_engine_choices_total") < 7:
            pass
    ends = {
        reason: grown(before, after, f"kvern_engine_choices_total{{'reason': '{reason}'}}")
        for reason in ("stop", "length", "abort", "error")
    }
    assert ends == {"stop": 1, "length": 1, "abort": 5, "error": 0}
    assert grown(before, after, "kvern_engine_request_duration_seconds_count") == 2
    assert grown(before, after, "kvern_engine_time_to_first_token_seconds_count") == 7
    told = {sample: value for sample, value in after.items() if sample.startswith("vllm:request_success_total{")}
    assert (
        sum(value for sample, value in told.items() if "abort" in sample)
        == after["kvern_engine_choices_total{'reason': 'abort'}"]
    )


async def test_counters_only_grow_from_scrape_to_scrape(process: Process) -> None:
    """H07, while requests run."""
    async with connect(process.address) as (connection, _):
        for number in range(4):
            await connection.add(number, [10 + number], 100)
        scrapes = [await process.scrape() for _ in range(20)]
        await connection.read_until_ended(*range(4))
    for before, after in pairwise(scrapes):
        for name, value in before.items():
            if name.partition("{")[0].endswith(("_total", "_count", "_sum")):
                assert after[name] >= value, name


async def test_metrics_tell_what_the_engine_is_and_that_it_rests(process: Process) -> None:
    text = await process.text()
    for label in ('device="cpu"', 'dtype="float32"', 'model="tiny"', 'num_blocks="2048"', 'max_model_len="4096"'):
        assert any(label in line for line in text.splitlines() if line.startswith("kvern_engine_info{"))
    async with asyncio.timeout(TIMEOUT_S):
        # Its last step has been told of before it rests.
        while (told := await process.scrape())["kvern_engine_step_age_seconds"]:
            pass
    assert told["kvern_engine_kv_blocks"] == NUM_BLOCKS
    for name in ("stalled", "kv_usage_ratio", "kv_blocks_used", "requests_running"):
        assert (name, told[f"kvern_engine_{name}"]) == (name, 0)
    assert told["kvern_engine_load_seconds"] > 0
    assert "kvern_engine_redis_up" not in told


async def test_recompute_after_preemption_is_no_hit() -> None:
    """H03: a pool too small for random prompts that differ, so that they take each other's blocks."""
    draw = random.Random(0)
    metrics = EngineMetrics(CollectorRegistry(), "tiny", None)
    core = make_core()
    for number in range(8):  # before it runs, so that they all meet
        prompt = [draw.randrange(50) for _ in range(8)]
        add = engine_pb2.AddRequest(
            prompt_token_ids=prompt, stopping=inference_pb2.Stopping(max_tokens=40), arrived_ns=1
        )
        metrics.requests.add(add, {0: number})
        core.send(Add(make_request(number, prompt, 40)))
    num_ended = 0
    with core_running(core) as outputs:
        while num_ended < 8:
            output = outputs.get(timeout=10)
            assert isinstance(output, StepResult)
            metrics.on_output(output)
            num_ended += len(output.ended)
    stats = metrics.stats
    assert stats.load.num_preemptions > 0
    assert stats.prefix_cache_queries == 8 * 8
    assert stats.prefix_cache_hits == 0
