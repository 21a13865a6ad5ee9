"""A fleet of replicas under a virtual clock: real scheduler, block pool, digests and choice; only steps are made up.

One router, whose own requests it knows at once. What it does not see happen it learns late: block events after the
index lag, replicas' load with their heartbeats. Hops between processes take no time.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from fleet_cost import StepCost
from fleet_router import FleetRouter
from fleet_workload import Arrival

from kvern.engine.block_pool import BlockPool, CacheEvent
from kvern.engine.block_tables import BlockTables
from kvern.engine.plan import FirstScheduled, Plan, SampledTokens, StepResult
from kvern.engine.request import Request, SamplingParams, StoppingParams
from kvern.engine.scheduler import Scheduler, SchedulerConfig
from kvern.services.router.choice import Policy

CONTRACT = "fleet"

_FIRST_OUTPUT_TOKEN = 2**31
"""Answer n is this token plus n, again and again: no later prompt holds it."""


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """What a fleet is made of."""

    num_replicas: int
    cost: StepCost
    block_size: int
    num_blocks: int
    """Of one replica."""
    max_num_seqs: int
    max_num_batched_tokens: int
    index_lag_s: float
    seed: int

    def scheduler(self, pool: BlockPool) -> Scheduler:
        config = SchedulerConfig(
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.block_size * self.num_blocks,
            eos_token_ids=frozenset(),
            contract=CONTRACT,
        )
        return Scheduler(pool, config)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one policy served all requests."""

    hit_rate: float
    """Share of all prompt tokens whose KV was reused."""
    ttft_p50_s: float
    ttft_p90_s: float
    itl_p99_s: float
    """Of the gaps between any two tokens of an answer."""
    imbalance: float
    """Tokens, of prompts and answers, that the replica with most of them computed, by those of the mean one."""
    busy: float
    """Share of the time, up to the end of the last answer, that the mean replica computed."""


class SimulatedReplica:
    """An engine without a model."""

    def __init__(self, config: FleetConfig) -> None:
        self._pool = BlockPool(config.num_blocks, record_events=True)
        self._scheduler = config.scheduler(self._pool)
        self._cost = config.cost
        self._plan: Plan | None = None
        self.busy_s = 0.0
        """How long it has computed."""
        self.num_tokens = 0
        """What it has computed."""

    @property
    def is_stepping(self) -> bool:
        return self._plan is not None

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add(self, request: Request) -> None:
        self._scheduler.add(request)

    def begin_step(self) -> tuple[Sequence[FirstScheduled], float]:
        """Plan a step. Return whose first it is, and how many seconds it takes."""
        self._plan = self._scheduler.schedule()
        step_s = self._cost.seconds(self._plan)
        self.busy_s += step_s
        self.num_tokens += self._plan.num_tokens
        return self._plan.first_scheduled, step_s

    def end_step(self) -> StepResult:
        assert self._plan is not None
        plan, self._plan = self._plan, None
        token_ids = [_output_token(entry.request.request_id) if entry.samples else None for entry in plan.entries]
        return self._scheduler.commit(plan, SampledTokens(token_ids))

    def take_events(self) -> list[CacheEvent]:
        return self._pool.take_events()


class Fleet:
    """Replicas and a router, in virtual time."""

    def __init__(self, config: FleetConfig, policy: Policy, arrivals: Sequence[Arrival]) -> None:
        self._arrivals = arrivals
        self._replicas = [SimulatedReplica(config) for _ in range(config.num_replicas)]
        self._router = FleetRouter(
            config.num_replicas, policy, config.block_size, config.index_lag_s, config.seed, CONTRACT
        )
        self._step_ends: list[tuple[float, int]] = []
        """(time, replica) of steps under way, a heap."""
        self._last_step_s = 0.0
        self._last_token_s: dict[int, float] = {}
        self._num_cached_tokens = 0
        self._ttft_s = array("d")
        self._gaps_s = array("d")

    def run(self, on_end: Callable[[], None]) -> Outcome:
        """Serve all requests to their end. `on_end` is called for each."""
        for number, arrival in enumerate(self._arrivals):
            self._run_until(arrival.arrival_s, on_end)
            self._arrive(number, arrival)
        self._run_until(float("inf"), on_end)
        busy_s = sum(replica.busy_s for replica in self._replicas)
        num_tokens = [replica.num_tokens for replica in self._replicas]
        return Outcome(
            hit_rate=self._num_cached_tokens / sum(arrival.input_length for arrival in self._arrivals),
            ttft_p50_s=float(np.percentile(self._ttft_s, 50)),
            ttft_p90_s=float(np.percentile(self._ttft_s, 90)),
            itl_p99_s=float(np.percentile(self._gaps_s, 99)) if self._gaps_s else 0.0,
            imbalance=max(num_tokens) * len(num_tokens) / sum(num_tokens),
            busy=busy_s / self._last_step_s / len(self._replicas),
        )

    def _run_until(self, until_s: float, on_end: Callable[[], None]) -> None:
        while self._step_ends and self._step_ends[0][0] <= until_s:
            now, index = heapq.heappop(self._step_ends)
            self._last_step_s = now
            result = self._replicas[index].end_step()
            self._router.learn(index, self._replicas[index].take_events(), now)
            self._take_tokens(result, now)
            for ended in result.ended:
                self._router.end(ended.request_id)
                del self._last_token_s[ended.request_id]
                on_end()
            if self._replicas[index].has_work:
                self._begin_step(index, now)

    def _arrive(self, number: int, arrival: Arrival) -> None:
        token_ids = arrival.token_ids
        index = self._router.choose(number, token_ids, arrival.arrival_s)
        replica = self._replicas[index]
        replica.add(_request(number, token_ids, arrival.output_length))
        if not replica.is_stepping:
            self._begin_step(index, arrival.arrival_s)

    def _begin_step(self, index: int, now: float) -> None:
        first_scheduled, step_s = self._replicas[index].begin_step()
        self._num_cached_tokens += sum(first.cached_tokens for first in first_scheduled)
        heapq.heappush(self._step_ends, (now + step_s, index))

    def _take_tokens(self, result: StepResult, now: float) -> None:
        for request_id in result.request_ids:
            last_s = self._last_token_s.get(request_id)
            if last_s is None:
                self._router.start(request_id, now)
                self._ttft_s.append(now - self._arrivals[request_id].arrival_s)
            else:
                self._gaps_s.append(now - last_s)
            self._last_token_s[request_id] = now


def pooled_hit_rate(config: FleetConfig, arrivals: Sequence[Arrival], on_end: Callable[[], None]) -> float:
    """Return the hit rate of one cache with all replicas' blocks, which requests use one after another."""
    pool = BlockPool(config.num_replicas * config.num_blocks)
    tables = BlockTables(pool, block_size=config.block_size, contract=CONTRACT, enable_prefix_caching=True)
    num_cached_tokens = 0
    for number, arrival in enumerate(arrivals):
        request = _request(number, arrival.token_ids, arrival.output_length)
        request.token_ids += [_output_token(number)] * arrival.output_length
        assert tables.admit(request, spare_blocks=0)
        num_cached_tokens += min(request.num_computed_tokens, arrival.input_length - 1)
        request.num_computed_tokens = request.num_tokens - 1
        tables.register_computed(request)
        tables.release(request)
        on_end()
    return num_cached_tokens / sum(arrival.input_length for arrival in arrivals)


def _request(number: int, token_ids: list[int], output_length: int) -> Request:
    return Request(
        request_id=number,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(),
        stopping=StoppingParams(max_tokens=output_length),
        arrival=number,
    )


def _output_token(number: int) -> int:
    return _FIRST_OUTPUT_TOKEN + number
