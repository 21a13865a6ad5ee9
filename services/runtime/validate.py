"""What a GenerateRequest may say. Checked once, where requests come in, before anything is done for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pydantic_core import from_json

from kvern.services.runtime.errors import InvalidArgument, Unsupported
from kvern.v1.inference_pb2 import Chat, ChatMessage, Constraint, GenerateRequest, Output, Sampling, Stopping

MAX_NAME_CHARS = 256
"""Of request_id, model, adapter, session_id and cache.salt: they are held in tables, logs and error messages."""

MAX_CHOICES = 128
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 64
"""Alternatives told of each token, in output and prompt."""

MAX_CONSTRAINT_CHARS = 256 * 1024
"""Of a schema, expression, grammar, or of all choices together."""
MAX_CONSTRAINT_CHOICES = 4096

MAX_CHAT_MESSAGES = 4096
MAX_CHAT_JSON_CHARS = 256 * 1024
"""Of all JSON fields of a chat together: parsing more would hold up other requests."""

MAX_AGE_S = 7 * 24 * 3600.0
"""Since a request came to its router, in seconds. No stream goes on for longer."""

_NAMES: tuple[tuple[str, Callable[[GenerateRequest], str]], ...] = (
    ("request_id", lambda request: request.request_id),
    ("model", lambda request: request.model),
    ("adapter", lambda request: request.adapter),
    ("session_id", lambda request: request.session_id),
    ("cache.salt", lambda request: request.cache.salt),
)

# NaN fails every comparison, so each test below is written to be true of what is right.
_SAMPLING_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: 0 <= value < math.inf, "a finite number, at least 0"),
    ("top_p", lambda value: 0 < value <= 1, "in (0, 1]"),
    ("min_p", lambda value: 0 <= value <= 1, "in [0, 1]"),
    ("presence_penalty", lambda value: -2 <= value <= 2, "in [-2, 2]"),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "in [-2, 2]"),
    ("repetition_penalty", lambda value: 0 < value < math.inf, "a finite number above 0"),
    ("n", lambda value: 1 <= value <= MAX_CHOICES, f"in [1, {MAX_CHOICES}]"),
)

_UNSUPPORTED: tuple[tuple[str, Callable[[GenerateRequest], bool]], ...] = (
    ("adapter", lambda request: bool(request.adapter)),
)
"""What the contract describes and this version does not do, each with the test that a request asks for it."""


def check_generate(request: GenerateRequest) -> None:
    """Check all that can be known without a tokenizer or a model.

    Raises InvalidArgument for what the contract forbids, Unsupported for what this version does not do.
    """
    for field, name_of in _NAMES:
        check_name(field, name_of(request))
    _check_prompt(request)
    _check_sampling(request.sampling)
    _check_stopping(request)
    _check_output(request.output)
    if request.HasField("constraint"):
        _check_constraint(request.constraint)
    if request.HasField("resume"):
        _check_resume(request)
    for field, asked_for in _UNSUPPORTED:
        if asked_for(request):
            raise Unsupported(field, "not supported by this version")


def check_name(field: str, value: str) -> None:
    """Raise InvalidArgument if a name is longer than any has reason to be."""
    if len(value) > MAX_NAME_CHARS:
        raise InvalidArgument(field, f"must be at most {MAX_NAME_CHARS} characters long, got {len(value)}")


def check_chat(chat: Chat) -> None:
    """Check the shape of a chat; what roles mean is the template's. Raises InvalidArgument."""
    if not chat.messages:
        raise InvalidArgument("chat.messages", "must not be empty")
    _check_count("chat.messages", len(chat.messages), MAX_CHAT_MESSAGES)
    _check_chat_json(chat)
    for index, message in enumerate(chat.messages):
        _check_message(f"chat.messages[{index}]", message)
    if chat.continue_final_message:
        _check_continuation(chat)


def _check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidArgument(field, f"must have at most {limit} items, got {count}")


def _check_prompt(request: GenerateRequest) -> None:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidArgument("prompt", "missing; give text, token_ids or chat")
    if kind == "text" and not request.text:
        raise InvalidArgument("text", "must not be empty")
    if kind == "token_ids" and not request.token_ids.ids:
        raise InvalidArgument("token_ids.ids", "must not be empty")
    if kind == "chat":
        check_chat(request.chat)
    if request.HasField("keep_last_tokens") and request.keep_last_tokens == 0:
        raise InvalidArgument("keep_last_tokens", "must be at least 1, got 0")


def _check_chat_json(chat: Chat) -> None:
    fields: list[tuple[str, str, type]] = [
        ("chat.tools_json", chat.tools_json, list),
        ("chat.template_kwargs_json", chat.template_kwargs_json, dict),
    ]
    for index, message in enumerate(chat.messages):
        fields.append((f"chat.messages[{index}].tool_calls_json", message.tool_calls_json, list))
        fields.append((f"chat.messages[{index}].content_parts_json", message.content_parts_json, list))
    num_chars = 0
    for field, text, kind in fields:
        num_chars += len(text)
        if num_chars > MAX_CHAT_JSON_CHARS:
            raise InvalidArgument(field, f"a chat's JSON fields may hold {MAX_CHAT_JSON_CHARS} characters in all")
        if text:
            _check_json(field, text, kind)


def _check_json(field: str, text: str, kind: type) -> None:
    # This parser also refuses half a surrogate pair, which no tokenizer takes, and bounds the depth.
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidArgument(field, f"must be JSON: {error}") from error
    if not isinstance(value, kind):
        raise InvalidArgument(field, f"must be a JSON {'array' if kind is list else 'object'}")


def _check_message(field: str, message: ChatMessage) -> None:
    if not message.role:
        raise InvalidArgument(f"{field}.role", "must not be empty")
    if message.HasField("content") and message.content_parts_json:
        raise InvalidArgument(f"{field}.content_parts_json", "stands in place of content; give one of them")


def _check_continuation(chat: Chat) -> None:
    if chat.add_generation_prompt:
        raise InvalidArgument("chat.add_generation_prompt", "cannot be true where continue_final_message is")
    if chat.messages[-1].role != "assistant":
        raise InvalidArgument("chat.continue_final_message", "needs a last message of the assistant")


def _check_sampling(sampling: Sampling) -> None:
    given = {descriptor.name: value for descriptor, value in sampling.ListFields()}
    for name, is_right, limit in _SAMPLING_RANGES:
        if name in given and not is_right(given[name]):
            raise InvalidArgument(f"sampling.{name}", f"must be {limit}, got {given[name]:g}")
    _check_count("sampling.logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES)
    for token_id, bias in sampling.logit_bias.items():
        if not -100 <= bias <= 100:
            raise InvalidArgument(f"sampling.logit_bias[{token_id}]", f"must be in [-100, 100], got {bias:g}")
    _check_count("sampling.bad_words", len(sampling.bad_words), MAX_BAD_WORDS)
    _check_not_empty("sampling.bad_words", sampling.bad_words)
    _check_lengths("sampling.bad_words", sampling.bad_words, MAX_BAD_WORD_CHARS)


def _check_not_empty(field: str, texts: Sequence[str]) -> None:
    for index, text in enumerate(texts):
        if not text:
            raise InvalidArgument(f"{field}[{index}]", "must not be an empty string")


def _check_stopping(request: GenerateRequest) -> None:
    stopping = request.stopping
    if stopping.HasField("max_tokens"):
        _check_max_tokens(request)
    _check_count("stopping.stop", len(stopping.stop), MAX_STOP_STRINGS)
    _check_count("stopping.stop_token_ids", len(stopping.stop_token_ids), MAX_STOP_TOKEN_IDS)
    _check_not_empty("stopping.stop", stopping.stop)
    _check_lengths("stopping.stop", stopping.stop, MAX_STOP_CHARS)


def _check_max_tokens(request: GenerateRequest) -> None:
    stopping = request.stopping
    reads_the_prompt = request.output.echo or request.output.HasField("prompt_logprobs")
    if stopping.max_tokens == 0 and not reads_the_prompt:
        raise InvalidArgument("stopping.max_tokens", "must be at least 1 without echo or prompt_logprobs, got 0")
    if stopping.min_tokens > stopping.max_tokens:
        message = f"must be at most max_tokens, which is {stopping.max_tokens}, got {stopping.min_tokens}"
        raise InvalidArgument("stopping.min_tokens", message)


def _check_output(output: Output) -> None:
    for field in ("logprobs", "prompt_logprobs"):
        if (count := getattr(output, field)) > MAX_LOGPROBS:
            raise InvalidArgument(f"output.{field}", f"must be at most {MAX_LOGPROBS}, got {count}")


def _check_resume(request: GenerateRequest) -> None:
    resume, sampling = request.resume, request.sampling
    if sampling.HasField("seed") and sampling.seed != resume.seed:
        raise InvalidArgument("resume.seed", f"must be sampling.seed, which is {sampling.seed}, got {resume.seed}")
    if not resume.choices:
        raise InvalidArgument("resume.choices", "must not be empty")
    num_choices = sampling.n if sampling.HasField("n") else 1
    seen: set[int] = set()
    for position, choice in enumerate(resume.choices):
        field = f"resume.choices[{position}].index"
        if choice.index >= num_choices:
            raise InvalidArgument(field, f"must be below sampling.n, which is {num_choices}, got {choice.index}")
        if choice.index in seen:
            raise InvalidArgument(field, f"must be given once, got {choice.index} again")
        seen.add(choice.index)
        _check_progress(f"resume.choices[{position}].token_ids", len(choice.token_ids), request.stopping)


def _check_progress(field: str, num_tokens: int, stopping: Stopping) -> None:
    if stopping.HasField("max_tokens") and num_tokens > stopping.max_tokens:
        message = f"must hold at most max_tokens ids, which is {stopping.max_tokens}, got {num_tokens}"
        raise InvalidArgument(field, message)


def _check_lengths(field: str, texts: Sequence[str], limit: int) -> None:
    for index, text in enumerate(texts):
        if len(text) > limit:
            raise InvalidArgument(f"{field}[{index}]", f"must be at most {limit} characters long, got {len(text)}")


def _check_constraint(constraint: Constraint) -> None:
    """Check what needs no grammar library. Whether it can be done is the engine's to say."""
    kind = constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument("constraint", "names no kind of constraint")
    if kind == "choices":
        _check_choices(constraint.choices.values)
    elif kind == "json_object":
        if not constraint.json_object:
            raise InvalidArgument("constraint.json_object", "must be true where it is given")
    else:
        field, text = f"constraint.{kind}", getattr(constraint, kind)
        if not text:
            raise InvalidArgument(field, "must not be empty")
        _check_chars(field, len(text))
        if kind in ("json_schema", "structural_tag"):
            _check_json(field, text, dict)


def _check_choices(values: Sequence[str]) -> None:
    field = "constraint.choices.values"
    if not values:
        raise InvalidArgument(field, "must not be empty")
    _check_count(field, len(values), MAX_CONSTRAINT_CHOICES)
    _check_not_empty(field, values)
    _check_chars(field, sum(map(len, values)))


def _check_chars(field: str, num_chars: int) -> None:
    if num_chars > MAX_CONSTRAINT_CHARS:
        raise InvalidArgument(field, f"must be at most {MAX_CONSTRAINT_CHARS} characters long, got {num_chars}")
