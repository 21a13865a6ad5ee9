"""Log-probabilities in the two forms that OpenAI's API has for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvern.services.gateway.errors import ApiError
from kvern.v1.inference_pb2 import TokenLogprob, TokenLogprobs

MAX_HELD_OF_CHAT = 128 * 1024
"""Log-probabilities, of sampled and of likely tokens, that wait for the end of an answer. Each takes a kilobyte."""

MAX_HELD_OF_COMPLETION = 512 * 1024
"""Likewise, of all prompts and answers together. Each takes 200 bytes."""

_LEAST = -9999.0
"""What stands for minus infinity, which JSON has no number for."""


def of_chat(told: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    """Return tokens as items of `logprobs.content`."""
    return [{**_token(each.sampled), "top_logprobs": [_token(top) for top in each.top]} for each in told]


def _token(told: TokenLogprob) -> dict[str, Any]:
    return {
        "token": told.token.decode(errors="replace"),
        "logprob": max(told.logprob, _LEAST),
        "bytes": list(told.token),
    }


class HeldLogprobs:
    """Counts those that are held until an answer ends."""

    def __init__(self, param: str, limit: int) -> None:
        """param: the request's field that asks for them."""
        self._param = param
        self._limit = limit
        self._count = 0

    def add(self, told: Iterable[TokenLogprobs], times: int = 1) -> None:
        """Count them as often as they are held. Raises ApiError beyond the limit."""
        self._count += times * sum(1 + len(each.top) for each in told)
        if self._count > self._limit:
            message = f"{self._param}: an answer may hold {self._limit} log-probabilities; ask for fewer, or a stream"
            raise ApiError(400, message, self._param, "invalid_value")


class CompletionLogprobs:
    """Those of one text, in the form of completions: a list each for tokens, values, alternatives and places."""

    def __init__(self) -> None:
        self._offset = 0
        """Where the next token begins, in characters of the text."""
        self._clear()

    def add_prompt(self, told: Sequence[TokenLogprobs], text: str, rest: Iterable[TokenLogprobs]) -> None:
        """Add a prompt, whose first token has no value. Its bytes are what a text has before all other tokens'.

        text: begins with the prompt's. rest: the tokens in it that come after the prompt.
        """
        num_bytes = sum(len(each.sampled.token) for each in (*told, *rest))
        encoded = text.encode()
        self._add(encoded[: max(len(encoded) - num_bytes, 0)], None, None)
        self.add(told)

    def add(self, told: Iterable[TokenLogprobs]) -> None:
        for each in told:
            tops = {_name(top.token): max(top.logprob, _LEAST) for top in each.top}
            tops.setdefault(_name(each.sampled.token), max(each.sampled.logprob, _LEAST))
            self._add(each.sampled.token, max(each.sampled.logprob, _LEAST), tops)

    def take(self) -> dict[str, Any] | None:
        """Return what was added since it was last taken."""
        if not self._tokens:
            return None
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }
        self._clear()
        return taken

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def _add(self, token: bytes, value: float | None, tops: dict[str, float] | None) -> None:
        self._tokens.append(_name(token))
        self._values.append(value)
        self._tops.append(tops)
        self._offsets.append(self._offset)
        self._offset += len(token.decode(errors="ignore"))


def _name(token: bytes) -> str:
    """Return a token's text; where it is a part of a character, its bytes, so that different ones stay different."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
