"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from kvern.services.gateway.chat_request import ChatBody, param_in_chat
from kvern.services.gateway.generation_body import UInt32
from kvern.services.gateway.request_body import Body
from kvern.v1 import inference_pb2


class TokenizeRequest(Body):
    """Asks for a text's token ids."""

    neutral: ClassVar = {"return_token_strs": (False,)}

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    """Whether the tokenizer's own go before it. Default true."""

    def param_of(self, field: str) -> str:
        return "prompt" if field == "text" else field

    def to_proto(self) -> inference_pb2.TokenizeRequest:
        return inference_pb2.TokenizeRequest(
            model=self.model or "", text=self.prompt, add_special_tokens=self.add_special_tokens
        )


class TokenizeChatRequest(ChatBody):
    """Asks for the token ids that a chat stands for."""

    neutral: ClassVar = {"return_token_strs": (False,)}

    model: str | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer's own go before it. Default false: the template writes them."""

    def param_of(self, field: str) -> str:
        return param_in_chat(field)

    def to_proto(self) -> inference_pb2.TokenizeRequest:
        return inference_pb2.TokenizeRequest(
            model=self.model or "", chat=self.to_chat(), add_special_tokens=self.add_special_tokens
        )


class DetokenizeRequest(Body):
    """Asks for the text that token ids stand for, special tokens included."""

    model: str | None = None
    tokens: Annotated[list[UInt32], Field(fail_fast=True)]

    def param_of(self, field: str) -> str:
        return field.replace("ids", "tokens", 1)

    def to_proto(self) -> inference_pb2.DetokenizeRequest:
        return inference_pb2.DetokenizeRequest(model=self.model or "", ids=self.tokens, skip_special_tokens=False)
