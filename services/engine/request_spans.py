"""What a traced request did in the engine: queue, prefill, decode. Nothing is done for it at each step or token."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from kvern.engine.plan import StepResult
from kvern.engine.request import FinishReason
from kvern.services.runtime.tracing import Carrier, Kind, Span, Tracer


@dataclass(slots=True, eq=False)
class _Traced:
    """A request whose spans somebody will see."""

    carrier: Carrier
    span: Span
    """What it is in now."""
    num_choices: int
    unfinished: set[int]
    """Engine-wide ids of its choices."""
    reasons: list[str] = field(default_factory=list)


class RequestSpans:
    """Follows the traced requests among those in the engine, by the engine-wide ids of their choices."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._traced: dict[int, _Traced] = {}
        self._queued: set[int] = set()
        self._prefilled: set[int] = set()
        """Choices of requests that were scheduled and have no token yet."""

    def begin(self, numbers: Collection[int], traceparent: str) -> None:
        """Take in a request with its choices. traceparent: of its call; nothing where it is of no trace."""
        if not traceparent:
            return
        carrier = {"traceparent": traceparent}
        span = self._tracer.begin("queue", Kind.INTERNAL, carrier)
        if span.is_recording:
            traced = _Traced(carrier, span, len(numbers), set(numbers))
            self._traced.update(dict.fromkeys(numbers, traced))
            self._queued.update(numbers)

    def take(self, result: StepResult) -> None:
        """Take in what a step brought."""
        if not self._traced:
            return
        for scheduled in result.scheduled:
            if scheduled.request_id in self._queued:
                self._begin_prefill(self._traced[scheduled.request_id], scheduled.cached_tokens)
        if self._prefilled:
            for number in self._prefilled.intersection(result.request_ids):
                if number in self._prefilled:
                    self._begin_decode(self._traced[number])
        for ended in result.ended:
            self.end(ended.request_id, ended.reason)

    def refuse(self, number: int) -> None:
        """Forget a request that the engine does not take, by any of its choices."""
        if (traced := self._traced.get(number)) is not None:
            for each in list(traced.unfinished):
                self.end(each, FinishReason.ERROR)

    def end(self, number: int, reason: FinishReason) -> None:
        """Forget a choice. The last one ends its request's span."""
        traced = self._traced.pop(number, None)
        if traced is None:
            return
        self._queued.discard(number)
        self._prefilled.discard(number)
        traced.unfinished.discard(number)
        traced.reasons.append(reason.value)
        if not traced.unfinished:
            traced.span.set({"gen_ai.response.finish_reasons": traced.reasons})
            traced.span.end()

    def _begin_prefill(self, traced: _Traced, cached_tokens: int) -> None:
        self._queued -= traced.unfinished
        self._prefilled |= traced.unfinished
        self._go_on(traced, "prefill")
        traced.span.set({"gen_ai.usage.cache_read.input_tokens": cached_tokens})

    def _begin_decode(self, traced: _Traced) -> None:
        self._prefilled -= traced.unfinished
        self._go_on(traced, "decode")
        traced.span.set({"gen_ai.request.choice.count": traced.num_choices})

    def _go_on(self, traced: _Traced, name: str) -> None:
        traced.span.end()
        traced.span = self._tracer.begin(name, Kind.INTERNAL, traced.carrier)
