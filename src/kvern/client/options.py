"""How to generate: keyword options of `generate` and `chat`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict


class Timeouts(TypedDict, total=False):
    """How long a generation may take, over all its calls and the waits between them. TimedOut tells of the end."""

    timeout_s: float
    """Until its end, in seconds. The server knows it too and drops what it could not finish in time."""
    first_token_timeout_s: float
    """Until its first token, in seconds."""


class CallOptions(Timeouts, total=False):
    """What of a generation is of its calls, not of the request."""

    ticket: bytes
    """RouteResponse.ticket, for a replica that is called in place of the router."""


class GenerateOptions(CallOptions, total=False):
    """What is absent is the server's to choose.

    An option is named as its field in GenerateRequest or in one of its parts, and means what is written there. Where a
    field holds JSON, a value that is no text yet is turned into it.
    """

    request_id: str
    model: str
    priority: int
    adapter: str
    session_id: str
    add_special_tokens: bool
    keep_last_tokens: int

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    n: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Iterable[int]
    bad_words: str | Iterable[str]

    max_tokens: int
    min_tokens: int
    stop: str | Iterable[str]
    stop_token_ids: Iterable[int]
    ignore_eos: bool
    include_stop: bool

    logprobs: int
    prompt_logprobs: int
    token_ids: bool
    skip_special_tokens: bool
    echo: bool

    salt: str
    no_store: bool
    bypass: bool

    json_schema: str | Mapping[str, Any]
    regex: str
    grammar: str
    choices: Iterable[str]
    json_object: bool
    structural_tag: str | Mapping[str, Any]


class ChatOptions(GenerateOptions, total=False):
    """Further options of a conversation; they are fields of Chat."""

    tools: str | Sequence[Mapping[str, Any]]
    """Chat.tools_json."""
    template_kwargs: str | Mapping[str, Any]
    """Chat.template_kwargs_json."""
    add_generation_prompt: bool
    continue_final_message: bool
