"""What a broken stream's progress says of its choices: where they had ended, and which of their text is to be sent."""

from __future__ import annotations

from collections.abc import Sequence

from kvern.services.runtime.errors import InvalidArgument
from kvern.v1 import engine_pb2, inference_pb2


def end_of(
    token_ids: Sequence[int], request: inference_pb2.GenerateRequest, max_tokens: int, eos_token_ids: Sequence[int]
) -> engine_pb2.ChoiceEnd | None:
    """Return how the engine ended a choice after these tokens, None if it did not. As the engine's scheduler does."""
    if not token_ids:
        return None
    stopping, last = request.stopping, token_ids[-1]
    # After an end token no grammar goes on.
    is_eos = last in eos_token_ids and (request.HasField("constraint") or not stopping.ignore_eos)
    if is_eos or last in stopping.stop_token_ids:
        return engine_pb2.ChoiceEnd(reason=inference_pb2.FINISH_REASON_STOP, stop_token_id=last)
    if len(token_ids) >= max_tokens:
        return engine_pb2.ChoiceEnd(reason=inference_pb2.FINISH_REASON_LENGTH)
    return None


def after_sent(text: str, text_bytes: int, field: str) -> str:
    """Return the text after its first `text_bytes` bytes in UTF-8. Raises InvalidArgument if there is none such."""
    data = text.encode()
    if text_bytes > len(data):
        raise InvalidArgument(field, f"must be at most {len(data)}, the text of these tokens, got {text_bytes}")
    try:
        return data[text_bytes:].decode()
    except UnicodeDecodeError:
        raise InvalidArgument(field, f"must not cut a character, got {text_bytes}") from None
