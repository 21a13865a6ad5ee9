"""Scheduler and checked runner in one, stepped by hand, at any depth."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from kvern.engine.block_pool import BlockPool
from kvern.engine.plan import ChoiceEnded, Plan, StepResult, TokenLogprobs
from kvern.engine.request import CacheParams, Request, SamplingParams, StoppingParams
from kvern.engine.scheduler import Policy, Scheduler, SchedulerConfig

from .checked_runner import CheckedRunner, LazyStep
from .plain_model import PlainGrammar

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
    told_salt: str | None = None
    depth: int = 0
    abort_after: dict[int, int] = field(default_factory=dict)
    """After how many tokens a request is aborted."""
    outputs: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    ended: dict[int, ChoiceEnded] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    ids: Iterator[int] = field(default_factory=count)
    num_steps: int = 0
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
            told_salt=self.told_salt,
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
        sampling: SamplingParams | None = None,
        grammar_tokens: int | None = None,
        **options: object,
    ) -> Request:
        cache = CacheParams(**{key: options.pop(key) for key in ("salt", "no_store", "bypass") if key in options})  # type: ignore[arg-type]
        arrival, parent = next(self.ids), None
        for choice in range(n):
            request = Request(
                next(self.ids) if choice else arrival,
                list(prompt),
                len(prompt),
                sampling or SamplingParams(),
                StoppingParams(max_tokens, **options),  # type: ignore[arg-type]
                cache,
                prompt_logprobs=None if parent else prompt_logprobs,
                priority=priority,
                arrival=arrival,
                choice=choice,
                grammar=None if grammar_tokens is None else PlainGrammar(grammar_tokens),
                fork_of=parent,
            )
            self.scheduler.add(request)
            self.outputs[request.request_id] = []
            self.logprobs[request.request_id] = []
            self.prompt_logprobs[request.request_id] = []
            parent = parent or request
        assert parent is not None
        return parent

    def step(self) -> tuple[Plan, StepResult]:
        """Plan and submit a step, then commit those that are more than `depth` behind."""
        self.num_steps += 1
        plan, result = self.scheduler.schedule(), StepResult()
        assert plan.entries or self.in_flight, "no progress"
        assert plan.num_tokens <= self.max_num_batched_tokens
        assert len(plan.entries) <= self.max_num_seqs
        for scheduled in plan.first_scheduled:
            assert scheduled.request_id not in self.cached
            self.cached[scheduled.request_id] = scheduled.cached_tokens
        if plan:
            self.in_flight.append((plan, self.runner.submit(plan)))
        while len(self.in_flight) > self.depth or (self.in_flight and not plan):
            result = self.commit(*self.in_flight.popleft())
        return plan, result

    def commit(self, plan: Plan, step: LazyStep) -> StepResult:
        result = self.scheduler.commit(plan, step.result())
        self.scheduler.check_integrity()
        for told in result.prompt_logprobs:
            assert told.start == len(self.prompt_logprobs[told.request_id]) + 1
            self.prompt_logprobs[told.request_id] += told.items
        for entry, (request_id, token_id) in enumerate(zip(result.request_ids, result.token_ids, strict=True)):
            self.outputs[request_id].append(token_id)
            if entry in result.logprobs:
                self.logprobs[request_id].append(result.logprobs[entry])
            if self.abort_after.get(request_id) == len(self.outputs[request_id]):
                self.scheduler.abort(request_id)
        for ended in result.ended:
            assert ended.request_id not in self.ended, "a choice ended twice"
            self.ended[ended.request_id] = ended
        return result

    def run(self) -> None:
        while self.scheduler.has_work or self.in_flight:
            self.step()
        assert self.pool.num_used == 0
