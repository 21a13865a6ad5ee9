"""What becomes of a request's spans, whatever becomes of the request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from kvern.engine.plan import ChoiceEnded, FirstScheduled, StepResult
from kvern.engine.request import FinishReason
from kvern.services.engine.request_spans import RequestSpans
from kvern.services.runtime import otlp
from kvern.services.runtime.otlp import OtlpTracer
from tests.collector import Collector, Trace, collecting, new_client_span
from tests.up_process import PATIENCE_S

CLIENT = new_client_span()


@pytest.fixture
def collected() -> Iterator[tuple[Collector, str]]:
    with collecting() as collected:
        yield collected


@pytest_asyncio.fixture
async def tracer(collected: tuple[Collector, str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OtlpTracer]:
    monkeypatch.setattr(otlp, "CLOSE_S", PATIENCE_S)  # however slow the machine
    tracer = OtlpTracer("engine", collected[1], 1.0)
    yield tracer
    await tracer.close()


@pytest.fixture
def spans(tracer: OtlpTracer) -> RequestSpans:
    spans = RequestSpans(tracer)
    spans.begin([1, 2], CLIENT.traceparent)
    return spans


async def sent(tracer: OtlpTracer, collected: tuple[Collector, str]) -> Trace:
    await tracer.close()
    return collected[0].trace(CLIENT)


def reasons(trace: Trace, name: str) -> list[str]:
    told = trace.one("engine", name).attributes["gen_ai.response.finish_reasons"]
    return [each.string_value for each in told.values]  # type: ignore[attr-defined]


async def test_choices_share_one_span_for_each_thing_that_happens(
    spans: RequestSpans, tracer: OtlpTracer, collected: tuple[Collector, str]
) -> None:
    spans.take(StepResult(scheduled=[FirstScheduled(1, 7)]))
    spans.take(StepResult(scheduled=[FirstScheduled(2, 7)]))
    for _ in range(5):
        spans.take(StepResult(request_ids=[2, 1], token_ids=[3, 3]))
    spans.take(StepResult(ended=[ChoiceEnded(1, FinishReason.LENGTH)]))
    spans.end(2, FinishReason.STOP)
    trace = await sent(tracer, collected)
    assert trace.names() == ["queue", "prefill", "decode"]
    assert {each.span.parent_span_id.hex() for each in trace.spans} == {CLIENT.span_id}
    assert trace.one("engine", "prefill").attributes["gen_ai.usage.cache_read.input_tokens"] == 7
    assert reasons(trace, "decode") == ["length", "stop"]


async def test_request_aborted_in_its_prefill_ends_there(
    spans: RequestSpans, tracer: OtlpTracer, collected: tuple[Collector, str]
) -> None:
    spans.take(StepResult(scheduled=[FirstScheduled(1, 0)]))
    for number in (1, 2):
        spans.end(number, FinishReason.ABORT)
    spans.take(StepResult(request_ids=[1], token_ids=[3]))  # was under way
    trace = await sent(tracer, collected)
    assert trace.names() == ["queue", "prefill"]
    assert reasons(trace, "prefill") == ["abort", "abort"]


async def test_refused_request_ends_in_the_queue(
    spans: RequestSpans, tracer: OtlpTracer, collected: tuple[Collector, str]
) -> None:
    spans.refuse(1)
    spans.refuse(2)
    trace = await sent(tracer, collected)
    assert trace.names() == ["queue"]
    assert reasons(trace, "queue") == ["error", "error"]


async def test_requests_of_no_trace_leave_nothing(tracer: OtlpTracer, collected: tuple[Collector, str]) -> None:
    spans = RequestSpans(tracer)
    spans.begin([1], "")
    spans.begin([2], new_client_span("00").traceparent)
    spans.take(StepResult(scheduled=[FirstScheduled(1, 0), FirstScheduled(2, 0)]))
    for number in (1, 2):
        spans.end(number, FinishReason.LENGTH)
    await tracer.close()
    assert collected[0].trace_ids == []
