"""The body of POST /v1/completions, and the GenerateRequests it stands for."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import Discriminator, Field, Tag

from kvern.services.gateway.errors import ApiError
from kvern.services.gateway.generation_body import GenerationBody, NumLogprobs, UInt32
from kvern.v1.inference_pb2 import GenerateRequest, Output, TokenIds

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this route alone: clients that say nothing count on a short answer."""

MAX_PROMPTS = 128
MAX_CHOICES_OF_ALL = 512
"""Choices of all prompts together."""

Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[UInt32], Field(min_length=1, fail_fast=True)]
Prompt = str | list[int]


def _kind_of(prompt: object) -> str:
    """Return which form a prompt has, by its first item: to try them all on 100,000 token ids would take long."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else None
    if isinstance(first, list):
        return "lists of token ids"
    return "token ids" if isinstance(first, int) else "texts"


class CompletionRequest(GenerationBody):
    """What a client asks for. Several prompts are answered as if asked one by one."""

    neutral: ClassVar = GenerationBody.neutral | {"suffix": ("",)}

    prompt: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("texts")]
        | Annotated[Ids, Tag("token ids")]
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("lists of token ids")],
        Discriminator(_kind_of),
    ]
    echo: bool | None = None
    """Begin with the prompt."""
    logprobs: NumLogprobs | None = None
    """How many most likely tokens to tell of at each position, beside the sampled one."""
    best_of: int | None = None
    """Must be `n`, if given."""

    @property
    def prompts(self) -> list[Prompt]:
        """Each prompt by itself."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return list(self.prompt) if isinstance(self.prompt[0], str | list) else [self.prompt]

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.num_choices):
            message = f"best_of: must be n, which is {self.num_choices}, got {self.best_of}"
            raise ApiError(400, message, "best_of", "unsupported_parameter")
        num_choices = self.num_choices * len(self.prompts)
        if num_choices > MAX_CHOICES_OF_ALL:
            message = f"n: all prompts together may have {MAX_CHOICES_OF_ALL} choices, asked for {num_choices}"
            raise ApiError(400, message, "n", "invalid_value")

    def param_of(self, field: str) -> str:
        if field in ("prompt", "text", "token_ids", "token_ids.ids"):
            return "prompt"
        return re.sub(r"^token_ids\.ids\[", "prompt[", super().param_of(field))

    def param_in(self, number: int, field: str) -> str:
        """Return what this request calls a field of the GenerateRequest for one of its prompts."""
        param = self.param_of(field)
        is_one = isinstance(self.prompt, str) or self.prompts[0] is self.prompt
        return param if is_one else re.sub("^prompt", f"prompt[{number}]", param)

    def to_generate(self) -> list[GenerateRequest]:
        """Return a request for each prompt."""
        return [self._with_prompt(prompt) for prompt in self.prompts]

    def _with_prompt(self, prompt: Prompt) -> GenerateRequest:
        request = self.without_prompt()
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.CopyFrom(TokenIds(ids=prompt))
        return request

    def _max_tokens(self) -> int | None:
        return max(DEFAULT_MAX_TOKENS, self.min_tokens or 0) if self.max_tokens is None else self.max_tokens

    def _output(self) -> Output:
        output = super()._output()
        output.echo = bool(self.echo)
        if self.logprobs is not None:
            output.logprobs = self.logprobs
            if self.echo:
                output.prompt_logprobs = self.logprobs
        return output
