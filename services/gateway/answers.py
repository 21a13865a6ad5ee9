"""What the door answers: the bodies that are not made chunk by chunk, and the chunks' form for its description."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue
from starlette.responses import Response


class Answer(BaseModel):
    """Base of what is answered. What is not set is left out."""

    # Errors are logged, and may not tell what a model said.
    model_config = ConfigDict(use_attribute_docstrings=True, hide_input_in_errors=True)

    def to_response(self) -> Response:
        return Response(self.model_dump_json(exclude_unset=True), media_type="application/json")


class ErrorDetail(Answer):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: str | None


class ErrorAnswer(Answer):
    """Why a request failed. In a stream, an event."""

    error: ErrorDetail


class Model(Answer):
    """A model that can be asked for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Longest prompt and output together, in tokens."""


class ModelList(Answer):
    """The models that can be asked for now."""

    object: Literal["list"]
    data: list[Model]


class PromptTokensDetails(Answer):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    """Of the output's tokens."""

    reasoning_tokens: int


class Usage(Answer):
    """What a request took, all choices together. The prompt of a request counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(Answer):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of a choice's tokens."""

    content: list[TokenLogprob]
    refusal: None


class FunctionCall(Answer):
    """The function to call. In a stream, arguments come in pieces, and the name with the first."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A tool that the model wants called."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(Answer):
    """The model's answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Answer):
    """An answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(Answer):
    """Log-probabilities of a text's tokens. A prompt's first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Answer):
    """Texts that follow prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ToolCallDelta(Answer):
    """More of a tool call: id, type and name come first, arguments in pieces."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: dict[str, str]


class ChatDelta(Answer):
    """What is new of a choice."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(Answer):
    """More of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletionChunk(Answer):
    """An event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChunkChoice(Answer):
    """More of one text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChunk(Answer):
    """An event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class Tokenized(Answer):
    """The token ids that a prompt stands for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None


class Detokenized(Answer):
    """The text that token ids stand for."""

    prompt: str


class Health(Answer):
    """Whether requests can be served."""

    status: Literal["ok", "unavailable"]


class Version(Answer):
    """What runs here."""

    version: str


class Document(Answer):
    """This description."""

    openapi: str
    info: dict[str, JsonValue]
    paths: dict[str, JsonValue]
