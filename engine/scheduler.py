"""Who runs how many tokens in the next step. Pure Python: no torch, no clock, no threads.

One idea: a step is {request: num_tokens} under a token budget and a sequence budget. Prefill and decode are the same
kind of entry; a chunked prefill is one that ends early, a prefix hit one that starts later. There is no phase anywhere.

`schedule` plans a step, `commit` takes in its results. Between them further steps may be planned: a token that a step
in flight will draw counts as there, though its value is not known yet. Lengths are known ahead, so only stop tokens and
aborts leave a row in flight that is computed for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from kvern.engine.block_hash import DEFAULT_KEY
from kvern.engine.block_pool import BlockPool
from kvern.engine.block_tables import BlockTables
from kvern.engine.errors import RequestRefused
from kvern.engine.ordered_requests import OrderedRequests
from kvern.engine.plan import (
    NOTHING_ALLOWED,
    ChoiceEnded,
    FirstScheduled,
    Load,
    Plan,
    PlanEntry,
    SampledTokens,
    StepResult,
)
from kvern.engine.request import FinishReason, Request, RequestStatus
from kvern.engine.step_budget import MIN_CHUNK_TOKENS, StepBudget
from kvern.engine.step_cost import StepCost

_WATERMARK_SHARE = 0.01
"""Share of the pool left free at an admission while others run: they will soon need it to grow."""

_FIRST_CHUNK_TOKENS = 128
"""Prefill tokens a step while nothing is known of their cost."""


_NUM_NEXT = 16
"""Requests at the head of the queue that a long prompt may have to leave room for."""


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
    digest_key: bytes = field(default=DEFAULT_KEY, repr=False)
    enable_prefix_caching: bool = True
    policy: Policy = Policy.FCFS
    target_step_s: float | None = None
    """How long a step with decodes in it should take at most. None: as long as the token budget makes it."""
    told_salt: str | None = None


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
            digest_key=config.digest_key,
            told_salt=config.told_salt,
        )
        self._watermark = max(1, int(pool.num_blocks * _WATERMARK_SHARE))
        self._requests: dict[int, Request] = {}
        self._waiting = OrderedRequests()
        self._running = OrderedRequests()
        self._parked = OrderedRequests()
        self._prefilling: list[Request] = []
        """Those that run and have more than one known token to compute."""
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
        # After an end token no grammar goes on.
        eos_counts = request.grammar is not None or not request.stopping.ignore_eos
        eos_token_ids = self._config.eos_token_ids if eos_counts else frozenset()
        request.end_token_ids = request.stopping.stop_token_ids | eos_token_ids
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
        preempted = self._plan_entries(plan, self._running, budget, self._shortest_prompt())
        if not preempted:
            self._admit_waiting(plan, budget)
        if self._prefilling:
            self._spend_rest(plan, budget)
        plan.removed_ids, self._removed_ids = self._removed_ids, []
        return plan

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn how long a step took."""
        self._step_cost.observe(plan.num_decodes, plan.num_prefill_tokens, seconds)

    def expected_step_s(self, plan: Plan) -> float | None:
        """Return how long a step should take, in seconds, by those before it. None: none was like it."""
        return self._step_cost.expected_s(plan.num_decodes, plan.num_prefill_tokens)

    def commit(self, plan: Plan, sampled: SampledTokens) -> StepResult:
        """Take in what a step computed: advance requests, register blocks, append tokens, end what is done."""
        result = StepResult()
        self._end_failed(plan.entries, sampled, result)
        self._tell_prompts(plan.entries, sampled, result)
        self._advance(plan.entries, sampled.token_ids, result)
        if sampled.logprobs:
            result.take_logprobs(plan, sampled)
        self._prefilling = [request for request in self._prefilling if request.num_uncomputed_tokens > 1]
        result.load = self.load()
        return result

    def load(self) -> Load:
        """Return how busy the engine is now."""
        in_running = sum(max(0, each.num_prompt_tokens - each.num_computed_tokens) for each in self._prefilling)
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
        self._tables.check_integrity(self._requests.values())
        queues = (self._waiting, self._running, self._parked)
        assert all(queue.is_sorted() for queue in queues), "a queue is out of order"
        prefilling = {request for request in self._running if request.num_uncomputed_tokens > 1}
        assert set(self._prefilling) == prefilling, "who has a prompt to compute is not known"
        assert sum(map(len, queues)) == len(self._requests), "a request is nowhere, or twice"
        assert len(self._running) <= self._config.max_num_seqs, "too many sequences run"

    def _max_prefill_tokens(self) -> int:
        """Return how many prefill tokens the step-time target allows. It guards gaps: with nobody decoding, all."""
        if self._config.target_step_s is None:
            return self._config.max_num_batched_tokens
        num_decodes = len(self._running) - sum(each.num_unscheduled_tokens > 1 for each in self._prefilling)
        if num_decodes == 0:
            return self._config.max_num_batched_tokens
        allowed = self._step_cost.max_prefill_tokens(num_decodes, self._config.target_step_s)
        return _FIRST_CHUNK_TOKENS if allowed is None else max(MIN_CHUNK_TOKENS, allowed)

    def _shortest_prompt(self) -> float:
        """Return how many tokens of a prompt are left to compute where fewest are, of those that run or are next."""
        if not self._prefilling:
            return math.inf
        running = (request.num_unscheduled_tokens for request in self._prefilling)
        waiting = (request.num_prompt_tokens for request in islice(self._waiting, _NUM_NEXT))
        return min((*running, *waiting))

    def _plan_entries(
        self, plan: Plan, requests: OrderedRequests | list[Request], budget: StepBudget, shortest: float = math.inf
    ) -> bool:
        """Plan running requests, in order. Return whether one that runs was preempted for another.

        shortest: as `_shortest_prompt`. Longer ones leave a part of the budget to others.
        """
        entries, num_requests = plan.entries, len(requests)
        for index, request in enumerate(requests, start=1):
            if budget.tokens == 0:
                break
            start, num_foreseen = request.num_scheduled_tokens, request.num_foreseen_tokens
            if num_foreseen >= request.max_num_tokens:
                continue  # its last token is on its way
            wanted = num_tokens = num_foreseen - start
            if wanted == 1:
                budget.tokens -= 1  # as `take` does
            else:
                num_behind = len(requests) - index
                num_tokens = budget.take(wanted, num_behind, must_share=wanted > shortest)
                if num_tokens == 0:
                    continue
            end = start + num_tokens
            if end > request.num_writable_tokens and not self._grow(plan, request, end):
                break  # It is its own last victim: it keeps its blocks and waits for those before it.
            samples = num_tokens == wanted
            entries.append(PlanEntry(request, start, num_tokens, samples, request.table_generation))
            request.num_scheduled_tokens, request.num_foreseen_tokens = end, num_foreseen + samples
        return len(requests) < num_requests

    def _admit_waiting(self, plan: Plan, budget: StepBudget) -> None:
        for request in list(self._waiting):
            if not budget.has_prefill or len(self._running) >= self._config.max_num_seqs:
                return
            if request.num_pending_tokens or self._must_wait_for_twin(request):
                continue
            if not self._admit(plan, request):
                return
            self._plan_entries(plan, [request], budget)

    def _spend_rest(self, plan: Plan, budget: StepBudget) -> None:
        """Give what nobody else took to the prompts that had left some of the budget to others."""
        for entry in [entry for entry in plan.entries if not entry.samples]:
            request = entry.request
            wanted = request.num_unscheduled_tokens
            more = budget.take(wanted)
            entry.samples = more == wanted
            entry.num_tokens += more
            request.num_scheduled_tokens += more
            request.num_foreseen_tokens += entry.samples

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
        if request.num_uncomputed_tokens > 1:
            self._prefilling.append(request)
        return True

    def _grow(self, plan: Plan, request: Request, num_tokens: int) -> bool:
        """Give a running request the blocks that it lacks for `num_tokens` tokens. Return whether there were enough.

        Where too few are free they come from those who stand still, then from those who run after this one.
        """
        while not self._tables.grow(request, num_tokens, plan.block_copies):
            if self._take_idle_blocks(request):
                continue
            if self._running.last is request:
                return False
            self._preempt(self._running.last)
        return True

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
            self._prefilling = [each for each in self._prefilling if each is not request]
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

    def _end_failed(self, entries: Sequence[PlanEntry], sampled: SampledTokens, result: StepResult) -> None:
        """End requests for which no token could be drawn. Before anything is registered that they computed."""
        for index, error in sampled.errors.items():
            request = entries[index].request
            if request.status is RequestStatus.FINISHED:
                continue
            if error.is_corrupt:
                self._num_failed_choices += 1
                self._tables.drop_computed_by(request, self._holders())
            reason = "" if error.is_corrupt else NOTHING_ALLOWED
            self._end(request, result, FinishReason.ERROR, error=error.message, error_reason=reason)

    def _tell_prompts(self, entries: Sequence[PlanEntry], sampled: SampledTokens, result: StepResult) -> None:
        for index, told in sampled.prompt_logprobs.items():
            request = entries[index].request
            if request.status is not RequestStatus.FINISHED:
                # One preempted in its prompt computes positions again.
                news = told.beyond(request.num_prompt_logprobs)
                request.num_prompt_logprobs += len(news.items)
                result.prompt_logprobs.append(news)

    def _advance(self, entries: Sequence[PlanEntry], token_ids: Sequence[int | None], result: StepResult) -> None:
        block_size, request_ids, new_token_ids = self._config.block_size, result.request_ids, result.token_ids
        for entry, token_id in zip(entries, token_ids, strict=True):
            request, end = entry.request, entry.start + entry.num_tokens
            if entry.table_generation == request.table_generation:
                request.num_computed_tokens = end
                if end // block_size > request.num_chained_blocks:
                    self._tables.register_computed(request)
            elif request.status is RequestStatus.FINISHED:
                continue
            if token_id is None:
                continue
            if request.grammar is not None and not self._advance_grammar(request, token_id, result):
                continue
            request.token_ids.append(token_id)
            if token_id in request.end_token_ids or end + 1 >= request.max_num_tokens:
                self._end_at(request, token_id, result)
                if request.stopping.max_tokens == 0:
                    continue
            request_ids.append(request.request_id)
            new_token_ids.append(token_id)

    def _advance_grammar(self, request: Request, token_id: int, result: StepResult) -> bool:
        grammar = request.grammar
        if grammar is None or request.stopping.max_tokens == 0 or grammar.advance(token_id):
            return True
        error = f"no token may follow in what the output is held to: {grammar.error}"
        self._end(request, result, FinishReason.ERROR, error=error, error_reason=NOTHING_ALLOWED)
        return False

    def _end_at(self, request: Request, token_id: int, result: StepResult) -> None:
        """End a request with its last token."""
        if token_id in request.end_token_ids and request.stopping.max_tokens > 0:
            self._end(request, result, FinishReason.STOP, stop_token_id=token_id)
        else:
            self._end(request, result, FinishReason.LENGTH)

    def _end(
        self,
        request: Request,
        result: StepResult,
        reason: FinishReason,
        stop_token_id: int | None = None,
        error: str = "",
        error_reason: str = "",
    ) -> None:
        self._remove(request)
        told = (request.num_preemptions, error, error_reason)
        result.ended.append(ChoiceEnded(request.request_id, reason, stop_token_id, *told))

    def _holders(self) -> list[Request]:
        return [request for request in self._requests.values() if request.block_ids]
