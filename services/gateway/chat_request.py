"""The body of POST /v1/chat/completions, and the GenerateRequest it stands for."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvern.services.gateway.errors import ApiError
from kvern.services.gateway.request_body import Body
from kvern.v1.inference_pb2 import Chat, ChatMessage, Constraint, GenerateRequest, Sampling, Stopping

_UInt32 = Annotated[int, Field(ge=0, lt=2**32)]

_TokenId = Annotated[int, Field(strict=False, ge=0, lt=2**32)]
"""As a key: JSON's keys are strings."""

_PROMPT_FIELDS = ("prompt", "text", "token_ids")
_GROUPS = re.compile(r"^(sampling|stopping|output|chat)\.")


class TextPart(Body):
    """A typed part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a chat."""

    # Clients send back what they were answered, its empty fields included.
    neutral: ClassVar = {"annotations": (None, []), "audio": (None,), "function_call": (None,), "refusal": (None,)}

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def to_proto(self) -> ChatMessage:
        return ChatMessage(
            role=self.role,
            content=self._text(),
            name=self.name or "",
            reasoning_content=self.reasoning_content or "",
            tool_calls_json=json.dumps(self.tool_calls) if self.tool_calls else "",
            tool_call_id=self.tool_call_id or "",
        )

    def _text(self) -> str | None:
        # Templates of text models take no parts; they are joined as other servers do it.
        return "\n".join(part.text for part in self.content) if isinstance(self.content, list) else self.content


class StreamOptions(Body):
    """How a stream is sent."""

    include_usage: bool | None = None


class JsonSchema(Body):
    """What `response_format` of type json_schema holds. The schema is followed strictly, asked for or not."""

    neutral: ClassVar = {"strict": (None, True, False)}

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None


class ResponseFormat(Body):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def to_proto(self) -> Constraint | None:
        """Raises ApiError where the schema is missing."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return Constraint(json_object=True)
        if self.json_schema is None:
            field = "response_format.json_schema"
            raise ApiError(400, f"{field}: Field required", field, "missing_required_parameter")
        return Constraint(json_schema=json.dumps(self.json_schema.schema_))


class ChatCompletionRequest(Body):
    """What a client asks for. Limits are the router's to check, except what a GenerateRequest cannot hold."""

    neutral: ClassVar = {
        "audio": (None,),
        "function_call": (None, "none"),
        "functions": (None, []),
        "logprobs": (None, False),
        "metadata": (None, {}),
        "modalities": (None, ["text"]),
        "parallel_tool_calls": (None, True, False),
        "prediction": (None,),
        "reasoning_effort": (None,),
        "response_format": (None,),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "tool_choice": (None, "none", "auto"),
        "tools": (None, []),
        "top_logprobs": (None, 0),
        "verbosity": (None,),
        "web_search_options": (None,),
    }

    messages: list[Message]
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _UInt32 | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    n: _UInt32 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[_TokenId, float] | None = None
    max_tokens: _UInt32 | None = None
    max_completion_tokens: _UInt32 | None = None
    stop: str | list[str] | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Who asks changes nothing in the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Check fields against each other. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: only with stream", "stream_options", "invalid_value")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            message = "max_completion_tokens: stands in place of max_tokens; give one of them"
            raise ApiError(400, message, "max_completion_tokens", "invalid_value")

    def param_of(self, field: str) -> str:
        """Return what this request calls a field of its GenerateRequest."""
        if field.startswith(_PROMPT_FIELDS):
            return "messages"
        if field.startswith("constraint"):
            return "response_format"
        if field == "stopping.max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return _GROUPS.sub("", field)

    def to_generate(self) -> GenerateRequest:
        return GenerateRequest(
            model=self.model or "",
            chat=Chat(messages=[message.to_proto() for message in self.messages]),
            sampling=self._sampling(),
            stopping=self._stopping(),
            constraint=None if self.response_format is None else self.response_format.to_proto(),
        )

    def _sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=None if self.seed is None else self.seed % 2**64,
            n=self.n,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias or {},
        )

    def _stopping(self) -> Stopping:
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return Stopping(max_tokens=max_tokens, stop=[self.stop] if isinstance(self.stop, str) else self.stop)
