"""The fleet simulation, on synthetic tenants: relations that must hold whatever the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fleet
import pytest
from fleet_cost import H100, StepWork
from fleet_router import LateIndex
from fleet_simulation import Fleet, FleetConfig, pooled_hit_rate
from fleet_workload import HASH_TOKENS, Arrival, read_trace, tenant_requests

from kvern.engine.block_pool import CacheEvent
from kvern.engine.plan import Plan, PlanEntry
from kvern.engine.request import Request, SamplingParams, StoppingParams
from kvern.services.router.choice import Policy

BENCH = Path(__file__).parents[2] / "bench" / "fleet.py"

CONFIG = FleetConfig(
    num_replicas=4,
    cost=H100,
    block_size=HASH_TOKENS,
    num_blocks=200,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    index_lag_s=0.05,
    seed=0,
)
ARRIVALS = tenant_requests(num_tenants=8, count=150, rate=10, seed=1)


@pytest.fixture(scope="module")
def comparison() -> fleet.Comparison:
    return fleet.compare(CONFIG, list(Policy), ARRIVALS)


def test_prefix_policy_hits_more_and_answers_sooner_than_those_that_do_not_look(comparison: fleet.Comparison) -> None:
    prefix, others = comparison.policies["prefix"], [comparison.policies[name] for name in ("round-robin", "random")]
    assert all(prefix.hit_rate > 1.2 * other.hit_rate for other in others)
    assert all(prefix.ttft_p90_s < other.ttft_p90_s for other in others)
    assert prefix.hit_rate <= comparison.pooled_hit_rate


def test_outcomes_are_in_range(comparison: fleet.Comparison) -> None:
    for outcome in comparison.policies.values():
        assert 0 < outcome.hit_rate < 1
        assert 0 < outcome.ttft_p50_s <= outcome.ttft_p90_s
        assert outcome.itl_p99_s >= H100.step_s
        assert 1 <= outcome.imbalance <= CONFIG.num_replicas
        assert 0 < outcome.busy <= 1


def test_same_seed_gives_the_same_outcome(comparison: fleet.Comparison) -> None:
    again = Fleet(CONFIG, Policy.PREFIX, ARRIVALS).run(lambda: None)
    assert again == comparison.policies["prefix"]


def test_one_replica_reuses_what_one_cache_does() -> None:
    """Requests far apart: each finds all that came before."""
    arrivals = [replace(arrival, arrival_s=60.0 * number) for number, arrival in enumerate(ARRIVALS)]
    config = replace(CONFIG, num_replicas=1)
    outcome = Fleet(config, Policy.PREFIX, arrivals).run(lambda: None)
    assert outcome.hit_rate == pytest.approx(pooled_hit_rate(config, arrivals, lambda: None))
    assert outcome.imbalance == 1


def test_first_token_of_a_lone_request_takes_its_prefill_steps() -> None:
    arrival = Arrival(arrival_s=3.0, input_length=3000, output_length=3, hash_ids=(1, 2, 3, 4, 5, 6))
    outcome = Fleet(CONFIG, Policy.ROUND_ROBIN, [arrival]).run(lambda: None)
    prefill_s = 2 * H100.step_s + 3000 * H100.prefill_token_s + 3000 * 3000 / 2 * H100.pair_s
    assert outcome.ttft_p50_s == pytest.approx(prefill_s)
    assert outcome.itl_p99_s == pytest.approx(H100.step_s + H100.decode_s + 3001 * H100.context_token_s, rel=1e-3)


def test_every_request_ends_once() -> None:
    ended: list[None] = []
    Fleet(CONFIG, Policy.RANDOM, ARRIVALS).run(lambda: ended.append(None))
    assert len(ended) == len(ARRIVALS)


def test_late_index_knows_what_happened_a_lag_ago() -> None:
    index = LateIndex(lag_s=0.05)
    index.record(3, [CacheEvent(b"a", True), CacheEvent(b"b", True)], now=1.0)
    assert index.match([b"a", b"b", b"c"], now=1.04) == {}
    assert index.match([b"a", b"b", b"c"], now=1.05) == {3: 2}
    index.record(3, [CacheEvent(b"b", False)], now=2.0)
    assert index.match([b"a", b"b"], now=2.1) == {3: 1}


def test_step_work_counts_prefill_and_decode_apart() -> None:
    request = Request(0, [0] * 100, 100, SamplingParams(), StoppingParams(max_tokens=1))
    plan = Plan([PlanEntry(request, 50, 10, samples=False), PlanEntry(request, 99, 1, samples=True)])
    assert StepWork.of(plan) == StepWork(10, 1, decode_context=99, prefill_pairs=10 * 50 + 10 * 10 / 2)


def test_trace_is_read_at_a_speed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [7, 9]}
    trace.write_text((json.dumps(line) + "\n") * 3)
    arrivals = read_trace(trace, 2, speed=2.0)
    assert arrivals == [Arrival(1.5, 700, 5, (7, 9))] * 2
    assert arrivals[0].token_ids == [7] * HASH_TOKENS + [9] * (700 - HASH_TOKENS)


def test_json_and_plot_hold_every_policy(tmp_path: Path) -> None:
    png = tmp_path / "fleet.png"
    options = ["--tenants", "3", "--requests", "20", "--replicas", "2", "--json", "--plot", str(png)]
    done = subprocess.run([sys.executable, BENCH, *options], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert set(found["policies"]) == {"prefix", "least-loaded", "round-robin", "random"}
    names = {"hit_rate", "ttft_p50_s", "ttft_p90_s", "itl_p99_s", "imbalance"}
    assert all(names <= set(outcome) for outcome in found["policies"].values())
    assert 0 < found["pooled_hit_rate"] < 1
    assert png.read_bytes().startswith(b"\x89PNG")


def test_request_longer_than_the_pool_is_refused() -> None:
    options = ["--tenants", "3", "--requests", "20", "--kv-tokens", "1024"]
    done = subprocess.run([sys.executable, BENCH, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--kv-tokens 1024" in done.stderr
