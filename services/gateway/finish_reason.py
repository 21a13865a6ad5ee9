"""Why choices end, in OpenAI's words."""

from __future__ import annotations

from kvern.services.gateway.errors import ApiError
from kvern.v1 import inference_pb2
from kvern.v1.inference_pb2 import Finished

_FINISH_REASONS = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}


def finish_reason(finished: Finished) -> str:
    """Return why a choice ended. Raises ApiError if it failed."""
    reason = _FINISH_REASONS.get(finished.reason)
    if reason is None and finished.error_reason:
        raise ApiError(400, finished.error, code=finished.error_reason.lower())
    if reason is None:
        raise ApiError(500, finished.error or "the request was ended by an operator")
    return reason
