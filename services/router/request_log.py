"""One log line for each call when it ends, and one count for each Generate. No content."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import structlog

from kvern.services.router.identity.caller import current_caller
from kvern.services.router.metrics import RequestMetrics
from kvern.services.router.progress import Source
from kvern.services.router.tokenizer import TimeRemaining
from kvern.services.runtime.errors import ServiceError
from kvern.services.runtime.interceptors import code_of_ended, reason_of
from kvern.services.runtime.log_text import logged
from kvern.services.runtime.tracing import Span, current_span

_log = structlog.get_logger("kvern.request")


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request by the time it ends; empty where it did not get that far."""

    request_id: str = ""
    model: str = ""
    replica: str = ""
    """Address of the replica that served it last."""
    prompt_tokens: int = 0
    sources: list[Source] = field(default_factory=list)
    """The streams of replicas that it took."""
    num_moves: int = 0
    """How often another replica went on with its stream."""
    matched_tokens: int = 0
    """Prompt tokens whose KV that replica was expected to have."""
    cached_tokens: int | None = None
    """Prompt tokens whose KV it had; None if it did not come to that."""
    verdict: ServiceError | None = None
    """What the call was ended with from outside its handler, if it was."""

    @property
    def completion_tokens(self) -> int:
        """Output tokens of all choices that came from replicas."""
        return sum(source.num_tokens for source in self.sources)


@contextmanager
def log_request(metrics: RequestMetrics, time_remaining: TimeRemaining) -> Iterator[RequestRecord]:
    """Yield a record to fill. However the block ends, log it with status and duration, and end its metrics."""
    record = RequestRecord()
    start_s = time.monotonic()
    caller = current_caller()
    status, reason = grpc.StatusCode.OK, ""
    try:
        yield record
    except BaseException as error:
        ended_by = record.verdict or error
        status = code_of_ended(ended_by, time_remaining(), time.monotonic() - start_s)
        reason = reason_of(ended_by)
        raise
    finally:
        metrics.end(status, reason)
        _tell(current_span(), record)
        _log.info(
            "request ended",
            request_id=logged(record.request_id),
            tenant=caller.tenant,
            caller=caller.id,
            model=record.model,
            replica=record.replica,
            prompt_tokens=record.prompt_tokens,
            completion_tokens=record.completion_tokens,
            num_moves=record.num_moves,
            matched_tokens=record.matched_tokens,
            cached_tokens=record.cached_tokens,
            status=status.name,
            first_token_s=None if metrics.first_token_s is None else round(metrics.first_token_s, 4),
            duration_s=round(time.monotonic() - start_s, 4),
        )


@contextmanager
def log_call(method: str, model: str, time_remaining: TimeRemaining) -> Iterator[None]:
    """Log a call that is answered once, however the block ends."""
    start_s = time.monotonic()
    status = grpc.StatusCode.OK
    try:
        yield
    except BaseException as error:
        status = code_of_ended(error, time_remaining(), time.monotonic() - start_s)
        raise
    finally:
        caller = current_caller()
        _log.info(
            "call ended",
            method=method,
            tenant=caller.tenant,
            caller=caller.id,
            model=logged(model),
            status=status.name,
            duration_s=round(time.monotonic() - start_s, 4),
        )


def _tell(span: Span, record: RequestRecord) -> None:
    if not span.is_recording:
        return
    attributes: dict[str, str | int] = {
        "kvern.request_id": record.request_id,
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "kvern.replica": record.replica,
        "kvern.num_moves": record.num_moves,
    }
    if record.cached_tokens is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = record.cached_tokens
    span.set(attributes)
