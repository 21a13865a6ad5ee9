"""The body of POST /v1/chat/completions, and the GenerateRequest it stands for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from kvern.services.gateway.constraints import leaves_text_free, the_one_of
from kvern.services.gateway.errors import ApiError
from kvern.services.gateway.generation_body import GenerationBody, NumLogprobs, UInt32
from kvern.services.gateway.optional_calls import content_or_calls
from kvern.services.gateway.request_body import Body
from kvern.services.gateway.tools import (
    MAX_TOOLS,
    CacheControl,
    NamedTool,
    ReplayedCall,
    Tool,
    schema_of_arguments,
    schema_of_calls,
    tools_json,
)
from kvern.v1.inference_pb2 import Chat, ChatMessage, Constraint, GenerateRequest, Output

_PROMPT_FIELDS = ("prompt", "text", "token_ids", "chat")

_RENAMED_ROLES = {"developer": "system"}
"""OpenAI's name for what templates call otherwise."""


NO_FORMAT = "none"
"""Where outputs are not searched."""


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """How models write what is more than content, as `parsing` names it: NO_FORMAT, "auto", or one format's name."""

    tool_calls: str
    reasoning: str


class TextPart(Body):
    """A typed part of a message's content. Models here read text only."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class Message(Body):
    """One message of a chat."""

    # Clients send back what they were answered, its empty fields included.
    neutral: ClassVar = {"annotations": ([],)}

    role: str = Field(min_length=1)
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same, as vLLM has come to call it."""
    parsed: object = None
    """OpenAI's client sends back what it made of the content."""
    tool_calls: list[ReplayedCall] | None = None
    tool_call_id: str | None = None
    cache_control: CacheControl | None = None
    provider_specific_fields: dict[str, object] | None = None
    """LiteLLM sends back what else it was answered, by whomever."""

    @field_validator("reasoning")
    @classmethod
    def _is_the_same(cls, reasoning: str | None, info: ValidationInfo) -> str | None:
        if reasoning and info.data.get("reasoning_content") not in (None, "", reasoning):
            raise PydanticCustomError("value_error", "stands in place of reasoning_content; give one of them")
        return reasoning

    def to_proto(self) -> ChatMessage:
        return ChatMessage(
            role=_RENAMED_ROLES.get(self.role, self.role),
            content=self._text(),
            name=self.name or "",
            reasoning_content=self.reasoning_content or self.reasoning or "",
            tool_calls_json=self._tool_calls_json(),
            tool_call_id=self.tool_call_id or "",
        )

    def _text(self) -> str | None:
        if isinstance(self.content, list):
            # Templates of text models take no parts; they are joined as other servers do it.
            return "\n".join(part.text for part in self.content)
        if self.content is None and self.role == "assistant":
            # An answer that was calls and nothing else; many templates take no message without content.
            return ""
        return self.content

    def _tool_calls_json(self) -> str:
        if not self.tool_calls:
            return ""
        return json.dumps([call.to_json() for call in self.tool_calls], ensure_ascii=False)


class ChatBody(Body):
    """A chat as a model's template is given it."""

    messages: list[Message] = Field(min_length=1)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    """Default true: end the prompt where the assistant's turn begins."""
    continue_final_message: bool | None = None
    """Go on with the last message, which is the assistant's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template."""

    def to_chat(self) -> Chat:
        return Chat(
            messages=[message.to_proto() for message in self.messages],
            tools_json=tools_json(self.offered_tools) if self.offered_tools else "",
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            template_kwargs_json=self.template_kwargs_json,
        )

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return self.tools or []

    @property
    def template_kwargs_json(self) -> str:
        return json.dumps(self.chat_template_kwargs, ensure_ascii=False) if self.chat_template_kwargs else ""


def param_in_chat(field: str) -> str:
    """Return what a body calls a field of its Chat."""
    match field.removeprefix("chat."):
        case "tools_json":
            return "tools"
        case "template_kwargs_json":
            return "chat_template_kwargs"
        case name if name in _PROMPT_FIELDS or name.startswith("token_ids"):
            return "messages"
        case name:
            return name.replace("tool_calls_json", "tool_calls")


class ChatCompletionRequest(GenerationBody, ChatBody):
    """What a client asks for."""

    neutral: ClassVar = GenerationBody.neutral | {
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "include_reasoning": (True,),
        "modalities": (["text"],),
    }

    max_completion_tokens: UInt32 | None = None
    """The same as max_tokens."""
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """A variable of the template."""

    @property
    def offered_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tool(self) -> Tool | None:
        """The tool that must be called, where one is named. Raises ApiError where there is none of the name."""
        if not isinstance(self.tool_choice, NamedTool):
            return None
        name = self.tool_choice.function.name
        for tool in self.offered_tools:
            if tool.function.name == name:
                return tool
        field = "tool_choice.function.name"
        raise ApiError(400, f"{field}: no tool is called {name}", field, "invalid_value")

    @property
    def must_call(self) -> bool:
        """Whether the answer is calls of tools and nothing else."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def may_call_several(self) -> bool:
        return self.parallel_tool_calls is not False

    def check(self) -> None:
        super().check()
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            message = "max_completion_tokens: stands in place of max_tokens; give one of them"
            raise ApiError(400, message, "max_completion_tokens", "invalid_value")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs", "top_logprobs", "invalid_value")
        self._check_tools()

    def _check_tools(self) -> None:
        if self.must_call and not self.tools:
            raise ApiError(400, "tool_choice: only with tools", "tool_choice", "invalid_value")
        names = [tool.function.name for tool in self.offered_tools]
        for index, name in enumerate(names):
            if name in names[:index]:
                field = f"tools[{index}].function.name"
                raise ApiError(400, f"{field}: another tool is called {name}, too", field, "invalid_value")
        the_one_of(super().given_constraints())

    def given_constraints(self) -> dict[str, Constraint]:
        # An answer that is calls has no content that a format could hold.
        if (tool := self.forced_tool) is not None:
            return {"tools": schema_of_arguments(tool)}
        if self.must_call:
            return {"tools": schema_of_calls(self.offered_tools, in_parallel=self.may_call_several)}
        return super().given_constraints()

    @property
    def may_reason(self) -> bool:
        """Whether the answer may hold reasoning: what is held to a form as a whole has no room for any."""
        return all(map(leaves_text_free, self.given_constraints().values()))

    def param_of(self, field: str) -> str:
        if field == "stopping.max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if field == "output.logprobs":
            return "top_logprobs"
        return param_in_chat(super().param_of(field))

    def to_generate(self, formats: OutputFormats) -> GenerateRequest:
        request = self.without_prompt()
        request.chat.CopyFrom(self.to_chat())
        if self.offered_tools and not self.must_call and formats.tool_calls != NO_FORMAT:
            # What some models begin a call with is a special token.
            request.output.skip_special_tokens = False
            for field, content in self.given_constraints().items():
                request.constraint.CopyFrom(
                    content_or_calls(
                        field, content, self.offered_tools, formats.tool_calls, in_parallel=self.may_call_several
                    )
                )
        return request

    def _max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def _output(self) -> Output:
        output = super()._output()
        if self.logprobs:
            output.logprobs = self.top_logprobs or 0
        return output

    @property
    def template_kwargs_json(self) -> str:
        if self.reasoning_effort is None:
            return super().template_kwargs_json
        variables = {"reasoning_effort": self.reasoning_effort, **(self.chat_template_kwargs or {})}
        return json.dumps(variables, ensure_ascii=False)
