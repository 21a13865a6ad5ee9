"""One log line for each Generate call when it ends. No content."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import structlog

from kvern.services.runtime.errors import ServiceError
from kvern.services.runtime.interceptors import status_of

_log = structlog.get_logger("kvern.request")


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request by the time it ends; empty where it did not get that far."""

    request_id: str = ""
    model: str = ""
    replica: str = ""
    """Address of the replica that served it last."""
    prompt_tokens: int = 0
    num_moves: int = 0
    """How often another replica went on with its stream."""
    matched_tokens: int = 0
    """Prompt tokens whose KV that replica was expected to have."""
    cached_tokens: int | None = None
    """Prompt tokens whose KV it had; None if it did not come to that."""


@contextmanager
def log_request() -> Iterator[RequestRecord]:
    """Yield a record to fill, and log it with status and duration however the block ends."""
    record = RequestRecord()
    start_s = time.monotonic()
    status = grpc.StatusCode.OK
    try:
        yield record
    except BaseException as error:
        status = _status_of(error)
        raise
    finally:
        _log.info(
            "request ended",
            request_id=record.request_id,
            model=record.model,
            replica=record.replica,
            prompt_tokens=record.prompt_tokens,
            num_moves=record.num_moves,
            matched_tokens=record.matched_tokens,
            cached_tokens=record.cached_tokens,
            status=status.name,
            duration_s=round(time.monotonic() - start_s, 4),
        )


def _status_of(error: BaseException) -> grpc.StatusCode:
    if isinstance(error, ServiceError):
        return status_of(error)[0]
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code()
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        # The client's going away and its deadline look the same from here.
        return grpc.StatusCode.CANCELLED
    return grpc.StatusCode.INTERNAL
