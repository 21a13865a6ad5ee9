"""One log line for each request that came by no router, which would have logged it, when it ends. No content."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import structlog

from kvern.services.runtime.errors import ServiceError
from kvern.services.runtime.interceptors import code_of_ended, verdict_in
from kvern.services.runtime.log_text import logged

_log = structlog.get_logger("kvern.request")


@dataclass(slots=True)
class DirectRecord:
    """What is known of a request by the time it ends; empty where it did not get that far."""

    request_id: str = ""
    tenant: str = ""
    model: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    verdict: ServiceError | None = None
    """What the call was ended with for its reader, if it was."""


@contextmanager
def log_direct(door: str, time_remaining: Callable[[], float | None]) -> Iterator[DirectRecord]:
    """Yield a record to fill. However the block ends, log it with status and duration.

    door: which one the request came by.
    """
    record, start_s = DirectRecord(), time.monotonic()
    status = grpc.StatusCode.OK
    try:
        yield record
    except BaseException as error:
        ended_by = record.verdict or verdict_in(error) or error
        status = code_of_ended(ended_by, time_remaining(), time.monotonic() - start_s)
        raise
    finally:
        _log.info(
            "request ended",
            door=door,
            request_id=logged(record.request_id),
            tenant=record.tenant,
            model=record.model,
            prompt_tokens=record.prompt_tokens,
            completion_tokens=record.completion_tokens,
            status=status.name,
            duration_s=round(time.monotonic() - start_s, 4),
        )
