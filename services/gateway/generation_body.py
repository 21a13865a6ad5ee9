"""What the bodies of all routes that generate have in common, and the GenerateRequest it stands for."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import Field

from kvern.services.gateway.access import REQUEST_ID_PATTERN
from kvern.services.gateway.constraints import Given, ResponseFormat, StructuredOutputs, the_one_of
from kvern.services.gateway.errors import ApiError
from kvern.services.gateway.request_body import Body
from kvern.services.runtime.validate import MAX_CHOICES, MAX_LOGPROBS, MAX_NAME_CHARS, MAX_STOP_CHARS
from kvern.v1.inference_pb2 import Cache, Constraint, GenerateRequest, Output, Sampling, Stopping

UInt32 = Annotated[int, Field(ge=0, lt=2**32)]

TokenIdKey = Annotated[int, Field(strict=False, ge=0, lt=2**32)]
"""As a key: JSON's keys are strings."""

Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]

_GROUPS = re.compile(r"^(sampling|stopping|output)\.")
_BIAS = re.compile(r"^logit_bias\[(\d+)\]")
_RENAMED = {
    "cache.salt": "cache_salt",
    "keep_last_tokens": "truncate_prompt_tokens",
    "session_id": "prompt_cache_key",
}


class StreamOptions(Body):
    """How a stream is sent."""

    neutral: ClassVar = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    """End with a chunk that has no choices and says what was used."""

    continuous_usage_stats: bool | None = None
    """Have each chunk say what was used so far."""


class GenerationBody(Body):
    """What a client asks for. What depends on other fields or on the model is the router's to check."""

    neutral: ClassVar = {
        "detokenize": (True,),
        "length_penalty": (1.0,),
        "prompt_cache_options": ({},),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "spaces_between_special_tokens": (True,),
        "use_beam_search": (False,),
    }

    model: Name | None = None
    """May be left out where one model is served."""
    request_id: Annotated[str, Field(pattern=f"^{REQUEST_ID_PATTERN}$")] | None = None
    """Unique among the requests in flight. Header X-Request-Id names a request too, and may repeat."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1, lt=2**32)] | None = None
    """0 and -1 are all tokens."""
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: dict[TokenIdKey, Annotated[float, Field(ge=-100, le=100)]] | None = None
    allowed_token_ids: Annotated[list[UInt32], Field(fail_fast=True)] | None = None
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = None

    max_tokens: UInt32 | None = None
    min_tokens: UInt32 | None = None
    stop: StopString | list[StopString] | None = None
    stop_token_ids: list[UInt32] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None

    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer's own go before the prompt. Default: for texts; a chat's template writes them."""
    truncate_prompt_tokens: Annotated[int, Field(ge=1, lt=2**32)] | None = None
    """Keep only this many tokens of the prompt, the last ones."""
    cache_salt: Name | None = None
    """Only requests of the same salt share cached prefixes."""
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    """Lower runs earlier, where the engines' policy is priority."""
    prompt_cache_key: Name | None = None
    """Requests of one key prefer one replica."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, object] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    # None of these changes anything in an answer. What they ask to keep is not kept.
    metadata: dict[str, object] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def tells_usage_always(self) -> bool:
        """Whether each chunk tells usage."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """Check fields against each other. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: only with stream", "stream_options", "invalid_value")

    def param_of(self, field: str) -> str:
        """Return what this request calls a field of its GenerateRequest."""
        if field.startswith("constraint"):
            return next(iter(self.given_constraints()), field)
        return _RENAMED.get(field) or _BIAS.sub(r"logit_bias.\1", _GROUPS.sub("", field))

    def given_constraints(self) -> dict[str, Constraint]:
        """Return what the output must match, by the field that says so. Raises ApiError for what is incomplete."""
        guided = StructuredOutputs.model_construct(
            json_=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        given = Given()
        if self.response_format is not None:
            given.add("response_format", self.response_format.to_proto())
        if self.structured_outputs is not None:
            given.add_all("structured_outputs.", self.structured_outputs)
        given.add_all("guided_", guided)
        return given.by_field

    def without_prompt(self) -> GenerateRequest:
        """Return all but the prompt."""
        return GenerateRequest(
            request_id=self.request_id or "",
            model=self.model or "",
            sampling=self._sampling(),
            stopping=self._stopping(),
            output=self._output(),
            cache=Cache(salt=self.cache_salt) if self.cache_salt else None,
            constraint=the_one_of(self.given_constraints()),
            priority=self.priority or 0,
            session_id=self.prompt_cache_key or "",
            add_special_tokens=self.add_special_tokens,
            keep_last_tokens=self.truncate_prompt_tokens,
        )

    def _max_tokens(self) -> int | None:
        return self.max_tokens

    def _output(self) -> Output:
        # Ids, so that tokens can be counted as they come: a client may leave before the end says how many.
        return Output(token_ids=True, skip_special_tokens=self.skip_special_tokens)

    def _sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed % 2**64,
            n=self.n,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
        )

    def _stopping(self) -> Stopping:
        return Stopping(
            max_tokens=self._max_tokens(),
            min_tokens=self.min_tokens,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=bool(self.ignore_eos),
            include_stop=bool(self.include_stop_str_in_output),
        )
