"""Scheduler and checked runner in one, stepped by hand, at any depth."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from kvern.engine.block_pool import BlockPool
from kvern.engine.plan import ChoiceEnded, Plan, StepResult
from kvern.engine.request import CacheParams, Request, SamplingParams, StoppingParams
from kvern.engine.scheduler import Policy, Scheduler, SchedulerConfig

from .checked_runner import CheckedRunner, LazyStep

BLOCK_SIZE = 4


@dataclass
class Engine:
    """Scheduler and checked runner in one, stepped by hand."""

    num_blocks: int = 16
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    max_model_len: int = 64
    eos_token_ids: frozenset[int] = frozenset()
    caching: bool = True
    policy: Policy = Policy.FCFS
    target_step_s: float | None = None
    depth: int = 0
    outputs: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, ChoiceEnded] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    ids: Iterator[int] = field(default_factory=count)
    in_flight: deque[tuple[Plan, LazyStep]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, record_events=True)
        self.runner = CheckedRunner(self.num_blocks, BLOCK_SIZE)
        config = SchedulerConfig(
            block_size=BLOCK_SIZE,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            contract="test",
            enable_prefix_caching=self.caching,
            policy=self.policy,
            target_step_s=self.target_step_s,
        )
        self.scheduler = Scheduler(self.pool, config)

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        n: int = 1,
        prompt_logprobs: int | None = None,
        **options: object,
    ) -> Request:
        cache = CacheParams(**{key: options.pop(key) for key in ("salt", "no_store", "bypass") if key in options})  # type: ignore[arg-type]
        arrival, parent = next(self.ids), None
        for choice in range(n):
            request = Request(
                next(self.ids) if choice else arrival,
                list(prompt),
                len(prompt),
                SamplingParams(),
                StoppingParams(max_tokens, **options),  # type: ignore[arg-type]
                cache,
                prompt_logprobs=prompt_logprobs,
                priority=priority,
                arrival=arrival,
                choice=choice,
                fork_of=parent,
            )
            self.scheduler.add(request)
            self.outputs[request.request_id] = []
            parent = parent or request
        assert parent is not None
        return parent

    def step(self) -> tuple[Plan, StepResult]:
        """Plan and submit a step, then commit those that are more than `depth` behind."""
        plan, result = self.scheduler.schedule(), StepResult()
        assert plan.entries or self.in_flight, "no progress"
        assert plan.num_tokens <= self.max_num_batched_tokens
        assert len(plan.entries) <= self.max_num_seqs
        if plan:
            self.in_flight.append((plan, self.runner.submit(plan)))
        while len(self.in_flight) > self.depth or (self.in_flight and not plan):
            result = self.commit(*self.in_flight.popleft())
        return plan, result

    def commit(self, plan: Plan, step: LazyStep) -> StepResult:
        result = self.scheduler.commit(plan, step.result())
        self.scheduler.check_integrity()
        for request_id, token_id in zip(result.request_ids, result.token_ids, strict=True):
            self.outputs[request_id].append(token_id)
        for scheduled in result.scheduled:
            assert scheduled.request_id not in self.cached
            self.cached[scheduled.request_id] = scheduled.cached_tokens
        for ended in result.ended:
            assert ended.request_id not in self.ended, "a choice ended twice"
            self.ended[ended.request_id] = ended
        return result

    def run(self) -> None:
        while self.scheduler.has_work or self.in_flight:
            self.step()
        assert self.pool.num_used == 0
