"""Who runs how many tokens in the next step. Pure Python: no torch, no clock, no threads.

One idea: a step is {request: num_tokens} under a token budget and a sequence budget. Prefill and decode are the same
kind of entry; a chunked prefill is one that ends early, a prefix hit one that starts later. There is no phase anywhere.

`schedule` plans a step, `commit` takes in its results. Between them further steps may be planned: a token that a step
in flight will draw counts as there, though its value is not known yet. Lengths are known ahead, so only stop tokens and
aborts leave a row in flight that is computed for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvern.engine.block_pool import BlockPool
from kvern.engine.block_tables import BlockTables
from kvern.engine.errors import RequestRefused
from kvern.engine.ordered_requests import OrderedRequests
from kvern.engine.plan import ChoiceEnded, FirstScheduled, Load, Plan, PlanEntry, SampledToken, StepResult
from kvern.engine.request import FinishReason, Request, RequestStatus
from kvern.engine.step_budget import MIN_CHUNK_TOKENS, StepBudget
from kvern.engine.step_cost import StepCost

_WATERMARK_SHARE = 0.01
"""Share of the pool left free at an admission while others run: they will soon need it to grow."""

_FIRST_CHUNK_TOKENS = 128
"""Prefill tokens a step while nothing is known of their cost."""


class Policy(Enum):
    """What goes before what."""

    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Rules and limits. Names as in `EngineConfig`."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    contract: str
    enable_prefix_caching: bool = True
    policy: Policy = Policy.FCFS
    target_step_s: float | None = None
    """How long a step with decodes in it should take at most. None: as long as the token budget makes it."""


class Scheduler:
    """Owns all requests and the block pool. Called by the engine thread alone."""

    def __init__(self, pool: BlockPool, config: SchedulerConfig) -> None:
        self.pool = pool
        self._config = config
        self._tables = BlockTables(
            pool,
            block_size=config.block_size,
            contract=config.contract,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._watermark = max(1, int(pool.num_blocks * _WATERMARK_SHARE))
        self._requests: dict[int, Request] = {}
        self._waiting = OrderedRequests()
        self._running = OrderedRequests()
        self._parked = OrderedRequests()
        self._step_cost = StepCost()
        self._removed_ids: list[int] = []
        self._num_failed_choices = 0
        self._num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is there that is not parked."""
        return len(self._requests) > len(self._parked)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestRefused for one that can never run."""
        limit = min(self._config.max_model_len, self.pool.num_blocks * self._config.block_size)
        total = request.num_prompt_tokens + request.stopping.max_tokens
        if total > limit:
            raise RequestRefused(
                "stopping.max_tokens",
                f"{request.num_prompt_tokens} prompt tokens and max_tokens {request.stopping.max_tokens} make {total}, "
                f"the limit is {limit}",
            )
        priority = request.priority if self._config.policy is Policy.PRIORITY else 0
        request.order = (priority, request.arrival, request.choice)
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def abort(self, request_id: int) -> None:
        """Drop a request, wherever it stands, and free its blocks. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._remove(request)

    def park(self, request_id: int) -> None:
        """Let a request stand still, its blocks kept while nobody needs them. Unknown or parked ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None and request.status is not RequestStatus.PARKED:
            self._leave(request)
            self._tables.stop_leading(request)
            request.move_to(RequestStatus.PARKED)
            self._parked.add(request)

    def unpark(self, request_id: int) -> None:
        """Let a parked request go on. Others are ignored."""
        request = self._requests.get(request_id)
        if request is not None and request.status is RequestStatus.PARKED:
            self._parked.remove(request)
            request.move_to(RequestStatus.WAITING)
            self._waiting.add(request)

    def reset_cache(self) -> None:
        """Forget all cached blocks. Requests that run go on, and leave nothing behind."""
        self._tables.reset_cache(self._holders())

    def schedule(self) -> Plan:
        """Decide the next step, and allocate what it needs."""
        plan = Plan()
        budget = StepBudget(self._config.max_num_batched_tokens, self._max_prefill_tokens())
        preempted = self._schedule_running(plan, budget)
        if not preempted:
            self._admit_waiting(plan, budget)
        self._spend_rest(plan, budget)
        plan.removed_ids, self._removed_ids = self._removed_ids, []
        return plan

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn how long a step took."""
        num_decodes = plan.num_decodes
        self._step_cost.observe(num_decodes, plan.num_tokens - num_decodes, seconds)

    def expected_step_s(self, plan: Plan) -> float | None:
        """Return how long a step should take, in seconds, by those before it. None: none was like it."""
        num_decodes = plan.num_decodes
        return self._step_cost.expected_s(num_decodes, plan.num_tokens - num_decodes)

    def commit(self, plan: Plan, sampled: Sequence[SampledToken]) -> StepResult:
        """Take in what a step computed: advance requests, register blocks, append tokens, end what is done."""
        result = StepResult()
        for entry, token in zip(plan.entries, sampled, strict=True):
            self._commit_entry(entry, token, result)
        result.load = self.load()
        return result

    def load(self) -> Load:
        """Return how busy the engine is now."""
        in_running = sum(max(0, each.num_prompt_tokens - each.num_computed_tokens) for each in self._running)
        return Load(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_used_blocks=self.pool.num_used,
            queued_prefill_tokens=self._waiting.num_prompt_tokens + in_running,
            num_failed_choices=self._num_failed_choices,
            num_parked=len(self._parked),
            num_preemptions=self._num_preemptions,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if pool and requests disagree."""
        self.pool.check_integrity([request.block_ids for request in self._requests.values()])
        queues = (self._waiting, self._running, self._parked)
        assert all(queue.is_sorted() for queue in queues), "a queue is out of order"
        assert sum(map(len, queues)) == len(self._requests), "a request is nowhere, or twice"
        assert len(self._running) <= self._config.max_num_seqs, "too many sequences run"

    def _max_prefill_tokens(self) -> int:
        """Return how many prefill tokens the step-time target allows. It guards gaps: with nobody decoding, all."""
        num_decodes = sum(request.num_unscheduled_tokens == 1 for request in self._running)
        if self._config.target_step_s is None or not num_decodes:
            return self._config.max_num_batched_tokens
        allowed = self._step_cost.max_prefill_tokens(num_decodes, self._config.target_step_s)
        return _FIRST_CHUNK_TOKENS if allowed is None else max(MIN_CHUNK_TOKENS, allowed)

    def _schedule_running(self, plan: Plan, budget: StepBudget) -> bool:
        """Plan running requests, in order. Return whether one was preempted for another."""
        preempted, index = False, 0
        while index < len(self._running) and budget.tokens > 0:
            request = self._running[index]
            index += 1
            num_tokens = budget.grant(
                request.num_unscheduled_tokens,
                num_behind=len(self._running) - index,
                must_share=len(self._waiting) > 0 or index < len(self._running),
            )
            if num_tokens == 0:
                continue
            end = request.num_scheduled_tokens + num_tokens
            num_blocks = self._tables.num_missing_blocks(request, end)
            if num_blocks > 0:
                preempted |= self._make_room(num_blocks, request)
                if num_blocks > self.pool.num_free:
                    break  # It is its own last victim: it keeps its blocks and waits for those before it.
                plan.block_copies += self._tables.grow(request, end)
            self._plan_entry(plan, request, num_tokens, budget)
        return preempted

    def _admit_waiting(self, plan: Plan, budget: StepBudget) -> None:
        for request in list(self._waiting):
            if not budget.has_prefill or len(self._running) >= self._config.max_num_seqs:
                return
            if request.num_pending_tokens or self._must_wait_for_twin(request):
                continue
            if not self._admit(plan, request):
                return
            num_tokens = budget.grant(request.num_unscheduled_tokens, num_behind=0, must_share=False)
            self._plan_entry(plan, request, num_tokens, budget)

    def _spend_rest(self, plan: Plan, budget: StepBudget) -> None:
        """Give what nobody else took to the prompts that had left some of the budget to others."""
        for entry in plan.entries:
            request = entry.request
            more = budget.grant(request.num_unscheduled_tokens, num_behind=0, must_share=False)
            if more and not entry.samples:
                self._extend_entry(entry, more, budget)

    def _plan_entry(self, plan: Plan, request: Request, num_tokens: int, budget: StepBudget) -> None:
        entry = PlanEntry(request, request.num_scheduled_tokens, 0, False, request.table_generation)
        plan.entries.append(entry)
        self._extend_entry(entry, num_tokens, budget)

    def _extend_entry(self, entry: PlanEntry, num_tokens: int, budget: StepBudget) -> None:
        request = entry.request
        entry.samples = num_tokens == request.num_unscheduled_tokens
        entry.num_tokens += num_tokens
        request.num_scheduled_tokens += num_tokens
        request.num_pending_tokens += entry.samples
        budget.spend(num_tokens)

    def _must_wait_for_twin(self, request: Request) -> bool:
        """Whether another request is computing what this one would compute next."""
        parent = request.fork_of
        if parent is not None and parent.status is RequestStatus.RUNNING:
            return parent.num_scheduled_tokens < parent.num_prompt_tokens
        leader = self._tables.awaited_leader(request)
        if leader is None:
            return False
        if request.order[0] < leader.order[0]:  # or it would hold up those who are before it
            self._running.remove(leader)
            leader.order = (request.order[0], *leader.order[1:])
            self._running.add(leader)
        return True

    def _admit(self, plan: Plan, request: Request) -> bool:
        """Move a waiting request to the running ones if there are blocks for all its known tokens."""
        spare_blocks = self._watermark if len(self._running) else 0
        while not self._tables.admit(request, spare_blocks=spare_blocks):
            if not self._take_idle_blocks(request):
                return False
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            if request.fork_of is None:
                plan.first_scheduled.append(FirstScheduled(request.request_id, request.num_cached_tokens))
        self._waiting.remove(request)
        request.move_to(RequestStatus.RUNNING)
        self._running.add(request)
        return True

    def _make_room(self, num_blocks: int, request: Request) -> bool:
        """Take blocks from those who stand still, then from those who run after this one, until enough are free.

        Return whether one that runs was preempted.
        """
        preempted = False
        while num_blocks > self.pool.num_free:
            if self._take_idle_blocks(request):
                continue
            if self._running.last is request:
                break
            self._preempt(self._running.last)
            preempted = True
        return preempted

    def _take_idle_blocks(self, request: Request) -> bool:
        """Take all blocks of one other request that holds some and does not run, parked ones first."""
        for queue in (self._parked, self._waiting):
            for idle in reversed(queue):
                if idle.block_ids and idle is not request:
                    self._take_blocks(idle)
                    return True
        return False

    def _preempt(self, request: Request) -> None:
        """Take all blocks of a running request. It is computed again from its known tokens when there is room."""
        self._leave(request)
        self._take_blocks(request)
        request.move_to(RequestStatus.PREEMPTED)
        self._waiting.add(request)

    def _take_blocks(self, request: Request) -> None:
        self._tables.release(request)
        request.num_preemptions += 1
        self._num_preemptions += 1

    def _leave(self, request: Request) -> None:
        """Take a request out of the queue it is in."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._removed_ids.append(request.request_id)
            request.first_changed_block = 0
        elif request.status is RequestStatus.PARKED:
            self._parked.remove(request)
        else:
            self._waiting.remove(request)

    def _remove(self, request: Request) -> None:
        self._leave(request)
        self._tables.release(request)
        request.move_to(RequestStatus.FINISHED)
        del self._requests[request.request_id]

    def _commit_entry(self, entry: PlanEntry, token: SampledToken, result: StepResult) -> None:
        request = entry.request
        request.num_pending_tokens -= entry.samples
        if request.status is RequestStatus.FINISHED:
            return
        if token.error:
            if token.is_corrupt:
                self._num_failed_choices += 1
                self._tables.drop_computed_by(request, self._holders())
            self._end(request, result, FinishReason.ERROR, error=token.error)
            return
        if entry.table_generation == request.table_generation:
            request.num_computed_tokens = entry.end
            self._tables.register_computed(request)
        if token.prompt_logprobs is not None:
            # One preempted in its prompt computes positions again.
            news = token.prompt_logprobs.beyond(request.num_prompt_logprobs)
            request.num_prompt_logprobs += len(news.items)
            result.prompt_logprobs.append(news)
        self._append(request, token, result)

    def _append(self, request: Request, token: SampledToken, result: StepResult) -> None:
        stopping, token_id = request.stopping, token.token_id
        if token_id is None:
            return
        if stopping.max_tokens == 0:
            self._end(request, result, FinishReason.LENGTH)
            return
        grammar = request.grammar
        if grammar is not None and not grammar.advance(token_id):
            self._end(request, result, FinishReason.ERROR, error=f"the grammar can go no further: {grammar.error}")
            return
        request.token_ids.append(token_id)
        if token.logprobs is not None:
            result.logprobs[len(result.token_ids)] = token.logprobs
        result.request_ids.append(request.request_id)
        result.token_ids.append(token_id)
        # After an end token no grammar goes on.
        is_eos = token_id in self._config.eos_token_ids and (grammar is not None or not stopping.ignore_eos)
        if is_eos or token_id in stopping.stop_token_ids:
            self._end(request, result, FinishReason.STOP, stop_token_id=token_id)
        elif request.num_output_tokens >= stopping.max_tokens:
            self._end(request, result, FinishReason.LENGTH)

    def _end(
        self,
        request: Request,
        result: StepResult,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: str = "",
    ) -> None:
        self._remove(request)
        result.ended.append(ChoiceEnded(request.request_id, reason, stop_token_id, request.num_preemptions, error))

    def _holders(self) -> list[Request]:
        return [request for request in self._requests.values() if request.block_ids]
