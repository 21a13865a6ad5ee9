"""How long each request waits and runs, from the front door's arrival stamp to its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvern.engine.plan import FirstScheduled, StepResult
from kvern.engine.request import FinishReason
from kvern.services.engine.stats import EngineStats
from kvern.v1 import engine_pb2

_NS = 1e-9


@dataclass(slots=True, eq=False)
class _Request:
    """Times are of time.monotonic_ns()."""

    arrived_ns: int
    num_prompt_tokens: int
    num_choices: int
    max_tokens: int
    reads_cache: bool
    open: set[int]
    """Engine-wide ids of its choices that have not ended."""
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int = 0
    """Of the choices that have ended, as what follows."""
    num_tokens: int = 0
    longest: int = 0
    """Tokens of the choice with the most."""
    is_aborted: bool = False


@dataclass(slots=True, eq=False)
class _Choice:
    request: _Request
    last_token_ns: int = 0
    """0 before the first."""
    num_tokens: int = 0


class RequestStats:
    """Follows all requests. All methods belong to the event loop.

    What is told of requests is observed once a request, however many choices it has: the first token is that of the
    choice that is first, the end that of the choice that is last, and a token's time that of the longest choice. A
    request that was aborted, wholly or in part, or refused has no end: how long it took is up to others.
    """

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._choices: dict[int, _Choice] = {}

    def __len__(self) -> int:
        """Choices that have not ended."""
        return len(self._choices)

    def add(self, add: engine_pb2.AddRequest, numbers: Mapping[int, int]) -> None:
        """Follow a request from its arrival. numbers: engine-wide ids by choice."""
        now_ns = time.monotonic_ns()
        request = _Request(
            # The stamp is another process's: it cannot be later than its message.
            arrived_ns=min(add.arrived_ns, now_ns) if add.arrived_ns else now_ns,
            num_prompt_tokens=len(add.prompt_token_ids),
            num_choices=add.sampling.n if add.sampling.HasField("n") else 1,
            max_tokens=add.stopping.max_tokens,
            reads_cache=not (add.cache.bypass or add.HasField("prompt_logprobs")),
            open=set(numbers.values()),
        )
        for number in request.open:
            self._choices[number] = _Choice(request)

    def drop(self, number: int, reason: FinishReason) -> None:
        """Count a choice that was taken from the engine before it had ended."""
        self._end(number, reason, time.monotonic_ns())

    def refuse(self, number: int) -> None:
        """Count a request that is not taken, once for all its choices."""
        choice = self._choices.get(number)
        if choice is not None:
            self._stats.refused += 1
            for each in choice.request.open:
                del self._choices[each]

    def take(self, result: StepResult) -> None:
        """Take in what a step brought."""
        now_ns = time.monotonic_ns()
        for scheduled in result.scheduled:
            self._schedule(scheduled, now_ns)
        self._take_tokens(result.request_ids, now_ns)
        for ended in result.ended:
            self._end(ended.request_id, ended.reason, now_ns)

    def _schedule(self, scheduled: FirstScheduled, now_ns: int) -> None:
        choice = self._choices.get(scheduled.request_id)
        if choice is None:
            return
        stats, request = self._stats, choice.request
        request.scheduled_ns = now_ns
        stats.queue_s.observe((now_ns - request.arrived_ns) * _NS)
        stats.request_prompt_tokens.observe(request.num_prompt_tokens)
        stats.request_choices.observe(request.num_choices)
        stats.request_max_tokens.observe(request.max_tokens)
        stats.prompt_tokens += request.num_prompt_tokens
        stats.cached_tokens += scheduled.cached_tokens
        if request.reads_cache:
            stats.prefix_cache_queries += request.num_prompt_tokens
            stats.prefix_cache_hits += scheduled.cached_tokens

    def _take_tokens(self, numbers: Sequence[int], now_ns: int) -> None:
        # Those that ran in the step before wait equally long: with hundreds of them, one observation is enough.
        same_gap: dict[int, int] = {}
        choices = self._choices
        for number in numbers:
            choice = choices.get(number)
            if choice is None:  # it was aborted while the step ran
                continue
            last_ns = choice.last_token_ns
            choice.last_token_ns = now_ns
            choice.num_tokens += 1
            if last_ns:
                same_gap[last_ns] = same_gap.get(last_ns, 0) + 1
            elif choice.request.first_token_ns is None:
                self._begin_output(choice.request, now_ns)
        for last_ns, times in same_gap.items():
            self._stats.inter_token_s.observe((now_ns - last_ns) * _NS, times)

    def _begin_output(self, request: _Request, now_ns: int) -> None:
        request.first_token_ns = now_ns
        self._stats.time_to_first_token_s.observe((now_ns - request.arrived_ns) * _NS)
        if request.scheduled_ns is not None:
            self._stats.prefill_s.observe((now_ns - request.scheduled_ns) * _NS)

    def _end(self, number: int, reason: FinishReason, now_ns: int) -> None:
        choice = self._choices.pop(number, None)
        if choice is None:
            return
        self._stats.choices[reason.value] += 1
        request = choice.request
        request.open.discard(number)
        request.is_aborted |= reason is FinishReason.ABORT
        request.last_token_ns = max(request.last_token_ns, choice.last_token_ns)
        request.num_tokens += choice.num_tokens
        request.longest = max(request.longest, choice.num_tokens)
        if not request.open and not request.is_aborted:
            self._finish(request, now_ns)

    def _finish(self, request: _Request, now_ns: int) -> None:
        stats = self._stats
        stats.duration_s.observe((now_ns - request.arrived_ns) * _NS)
        stats.request_generated_tokens.observe(request.num_tokens)
        if request.first_token_ns is None:
            return
        decode_s = (request.last_token_ns - request.first_token_ns) * _NS
        stats.decode_s.observe(decode_s)
        if request.longest > 1:
            stats.time_per_output_token_s.observe(decode_s / (request.longest - 1))
        if request.scheduled_ns is not None:
            stats.inference_s.observe((request.last_token_ns - request.scheduled_ns) * _NS)
