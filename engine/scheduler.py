"""Who runs how many tokens in the next step, and which blocks they hold. Pure Python: no torch, no clock, no threads.

One idea: a step is {request: num_tokens} under a token budget and a sequence budget. Prefill and decode are the same
kind of entry; a chunked prefill is one that ends early, a prefix hit one that starts later. There is no phase anywhere.

    known tokens      |<------- computed ------->|<-- this step -->|<-- later steps -->|
                      0          num_computed_tokens                              num_tokens

An entry that reaches num_tokens samples the next token. Admission allocates blocks for all known tokens, so only the
tokens a request generates can run out of blocks; then requests are preempted from the end of the order and computed
again later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from operator import attrgetter

from kvern.engine.block_hash import extend_digests, root_digest
from kvern.engine.block_pool import BlockPool
from kvern.engine.errors import RequestRefused
from kvern.engine.plan import ChoiceEnded, FirstScheduled, Load, Plan, PlanEntry, SampledToken, StepResult
from kvern.engine.request import FinishReason, Request, RequestStatus

_BY_ORDER = attrgetter("order")

_WATERMARK_SHARE = 0.01
"""Share of the pool left free at an admission while others run: they will soon need it to grow."""


class Scheduler:
    """Owns all requests and the block pool. Called by the engine thread alone."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        contract: str,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.pool = pool
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._contract = contract
        self._enable_prefix_caching = enable_prefix_caching
        self._watermark = max(1, int(pool.num_blocks * _WATERMARK_SHARE))
        self._requests: dict[int, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._removed_ids: list[int] = []
        self._scheduled: list[FirstScheduled] = []
        self._num_waiting_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestRefused for one that can never run."""
        limit = min(self._max_model_len, self.pool.num_blocks * self._block_size)
        total = request.num_tokens + request.stopping.max_tokens
        if total > limit:
            raise RequestRefused(
                "stopping.max_tokens",
                f"{request.num_tokens} prompt tokens and max_tokens {request.stopping.max_tokens} make {total}, "
                f"the limit is {limit}",
            )
        self._requests[request.request_id] = request
        self._queue(request)

    def abort(self, request_id: int) -> None:
        """Drop a request, wherever it stands, and free its blocks. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._remove(request)

    def schedule(self) -> Plan:
        """Decide the next step, and allocate what it needs."""
        plan = Plan()
        budget, preempted = self._schedule_running(plan)
        if not preempted:
            self._admit_waiting(plan, budget)
        plan.removed_ids, self._removed_ids = self._removed_ids, []
        return plan

    def commit(self, plan: Plan, sampled: Sequence[SampledToken]) -> StepResult:
        """Take in what a step computed: advance requests, register blocks, append tokens, end what is done."""
        result = StepResult(scheduled=self._scheduled)
        self._scheduled = []
        for entry, token in zip(plan.entries, sampled, strict=True):
            request = entry.request
            request.num_computed_tokens = entry.start + entry.num_tokens
            if token.error:
                self._end(request, result, FinishReason.ERROR, error=token.error)
                continue
            self._register_blocks(request)
            if token.token_id is not None:
                self._append(request, token.token_id, result)
        result.load = self.load()
        return result

    def load(self) -> Load:
        """Return how busy the engine is now."""
        running_prefill = sum(request.num_tokens - request.num_computed_tokens - 1 for request in self._running)
        return Load(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_used_blocks=self.pool.num_used,
            queued_prefill_tokens=self._num_waiting_tokens + running_prefill,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if pool and requests disagree."""
        self.pool.check_integrity([request.block_ids for request in self._requests.values()])
        assert self._running == sorted(self._running, key=_BY_ORDER), "running is out of order"
        assert self._waiting == sorted(self._waiting, key=_BY_ORDER), "waiting is out of order"
        assert len(self._running) + len(self._waiting) == len(self._requests), "a request is nowhere, or twice"
        assert self._num_waiting_tokens == sum(request.num_tokens for request in self._waiting), (
            "waiting tokens are off"
        )

    def _schedule_running(self, plan: Plan) -> tuple[int, bool]:
        budget, preempted, index = self._max_num_batched_tokens, False, 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            index += 1
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            num_blocks = self._num_blocks(request.num_computed_tokens + num_tokens) - len(request.block_ids)
            if num_blocks > 0:
                preempted |= self._make_room(num_blocks, request)
                if num_blocks > self.pool.num_free:
                    break  # It is its own last victim: it keeps its blocks and waits for those before it.
                request.block_ids += self.pool.allocate(num_blocks)
            plan.entries.append(self._entry(request, num_tokens))
            budget -= num_tokens
        return budget, preempted

    def _make_room(self, num_blocks: int, request: Request) -> bool:
        """Preempt requests after this one until the blocks are free. Return whether any was."""
        preempted = False
        while num_blocks > self.pool.num_free and self._running[-1] is not request:
            self._preempt(self._running[-1])
            preempted = True
        return preempted

    def _admit_waiting(self, plan: Plan, budget: int) -> None:
        while self._waiting and budget > 0 and len(self._running) < self._max_num_seqs:
            request = self._waiting[0]
            if not self._admit(request):
                break
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            plan.entries.append(self._entry(request, num_tokens))
            budget -= num_tokens

    def _entry(self, request: Request, num_tokens: int) -> PlanEntry:
        start = request.num_computed_tokens
        return PlanEntry(request, start, num_tokens, samples=start + num_tokens == request.num_tokens)

    def _admit(self, request: Request) -> bool:
        """Give a waiting request blocks for all its known tokens, if there are enough."""
        hits = self._find_hits(request)
        num_new = self._num_blocks(request.num_tokens) - len(hits)
        watermark = self._watermark if self._running else 0
        if num_new + self.pool.count_unreferenced(hits) + watermark > self.pool.num_free:
            return False
        self.pool.share(hits)
        request.block_ids = hits + self.pool.allocate(num_new)
        request.num_chained_blocks = len(hits)
        request.num_resident_tokens = len(hits) * self._block_size
        # The last known token always runs, to be sampled from.
        request.num_computed_tokens = min(request.num_resident_tokens, request.num_tokens - 1)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            self._scheduled.append(FirstScheduled(request.request_id, request.num_computed_tokens))
        self._unqueue(request)
        request.move_to(RequestStatus.RUNNING)
        insort(self._running, request, key=_BY_ORDER)
        return True

    def _find_hits(self, request: Request) -> list[int]:
        if not self._enable_prefix_caching or request.cache.bypass:
            return []
        self._extend_digests(request, request.num_tokens // self._block_size)
        return self.pool.find_prefix(request.block_digests)

    def _preempt(self, request: Request) -> None:
        """Take all blocks of a running request. It is computed again from its known tokens when there is room."""
        self._release_blocks(request)
        self._running.remove(request)
        self._removed_ids.append(request.request_id)
        request.move_to(RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        self._queue(request)

    def _append(self, request: Request, token_id: int, result: StepResult) -> None:
        request.token_ids.append(token_id)
        result.request_ids.append(request.request_id)
        result.choices.append(request.choice)
        result.token_ids.append(token_id)
        stopping = request.stopping
        is_eos = token_id in self._eos_token_ids and not stopping.ignore_eos
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
        result.ended.append(
            ChoiceEnded(request.request_id, request.choice, reason, stop_token_id, request.num_preemptions, error)
        )

    def _remove(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._release_blocks(request)
            self._running.remove(request)
            self._removed_ids.append(request.request_id)
        else:
            self._unqueue(request)
        request.move_to(RequestStatus.FINISHED)
        del self._requests[request.request_id]

    def _queue(self, request: Request) -> None:
        insort(self._waiting, request, key=_BY_ORDER)
        self._num_waiting_tokens += request.num_tokens

    def _unqueue(self, request: Request) -> None:
        self._waiting.remove(request)
        self._num_waiting_tokens -= request.num_tokens

    def _release_blocks(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = request.num_resident_tokens = 0
        request.num_chained_blocks = request.first_changed_block = 0

    def _register_blocks(self, request: Request) -> None:
        """Make full computed blocks findable, in order, for as long as the chain from the first one holds."""
        num_full = request.num_computed_tokens // self._block_size
        if not self._enable_prefix_caching or request.cache.no_store or request.cache.bypass:
            return
        self._extend_digests(request, num_full)
        while request.num_chained_blocks < num_full:
            index = request.num_chained_blocks
            parent = request.block_digests[index - 1] if index else None
            resident_id = self.pool.register(request.block_ids[index], request.block_digests[index], parent)
            if resident_id != request.block_ids[index]:
                request.block_ids[index] = resident_id
                request.first_changed_block = min(request.first_changed_block, index)
            request.num_chained_blocks += 1

    def _extend_digests(self, request: Request, num_blocks: int) -> None:
        known = len(request.block_digests)
        if known < num_blocks:
            parent = request.block_digests[-1] if known else self._root(request)
            ids = request.token_ids[known * self._block_size : num_blocks * self._block_size]
            request.block_digests += extend_digests(parent, ids, self._block_size)

    def _root(self, request: Request) -> bytes:
        return root_digest(self._contract, request.cache.salt)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
