"""Who did what to how the service runs: one line for each, in a log of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from kvern.services.router.identity.caller import current_caller
from kvern.services.runtime.interceptors import code_of
from kvern.services.runtime.log_text import logged

_log = structlog.get_logger("kvern.audit")

_ANONYMOUS = "anonymous"


@contextmanager
def audited(method: str, target: str) -> Iterator[None]:
    """Log an action by what came of it."""
    outcome = "OK"
    try:
        yield
    except BaseException as error:
        outcome = code_of(error).name
        raise
    finally:
        _tell(method, target, outcome)


def log_refused(method: str) -> None:
    """Log that the current caller may not call a method."""
    _tell(method, "", "PERMISSION_DENIED")


def _tell(method: str, target: str, outcome: str) -> None:
    caller = current_caller()
    _log.info(
        "admin action",
        actor=logged(caller.id) or _ANONYMOUS,
        tenant=caller.tenant,
        method=method,
        target=logged(target),
        outcome=outcome,
    )
