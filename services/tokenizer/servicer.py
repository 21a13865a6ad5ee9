"""TokenizerService: text to token ids and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import grpc

from kvern.engine.block_hash import DEFAULT_KEY, DIGEST_VERSION, key_fingerprint
from kvern.services.runtime.errors import InvalidArgument, NotFound
from kvern.services.runtime.text import Tokenizer, check_token_ids
from kvern.services.runtime.tracing import current_span
from kvern.services.tokenizer.metrics import TokenizerMetrics
from kvern.services.tokenizer.prefix_cache import PrefixCache
from kvern.services.tokenizer.prompt import PromptEncoder
from kvern.services.tokenizer.workers import Workers
from kvern.v1 import tokenizer_pb2, tokenizer_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Serves the tokenizers of one or several models, by the models' names."""

    def __init__(
        self,
        tokenizers: Mapping[str, Tokenizer],
        workers: Workers,
        cache: PrefixCache,
        metrics: TokenizerMetrics,
        digest_key: bytes = DEFAULT_KEY,
    ) -> None:
        self._tokenizers = tokenizers
        self._encoders = {name: PromptEncoder(tokenizer, cache, digest_key) for name, tokenizer in tokenizers.items()}
        self._encode = {name: metrics.counting(name, encoder.encode) for name, encoder in self._encoders.items()}
        self._workers = workers
        self._digest_key = digest_key

    async def EncodePrompt(
        self, request: tokenizer_pb2.EncodePromptRequest, context: _Context
    ) -> tokenizer_pb2.EncodePromptResponse:
        name, rendered, num_bytes = _name_of(self._encoders, request.model), None, request.ByteSize()
        if request.HasField("chat"):
            with current_span().child("render"):
                render = partial(self._encoders[name].render, request)
                rendered = await self._workers.render(name, num_bytes, render)
                num_bytes = max(num_bytes, len(rendered))  # a template may make much of little
        with current_span().child("encode") as span:
            encoded = await self._workers.run(num_bytes, self._encode[name], request, rendered)
            span.set({"kvern.num_tokens": len(encoded.token_ids)})
        return encoded

    async def DecodeTokens(
        self, request: tokenizer_pb2.DecodeTokensRequest, context: _Context
    ) -> tokenizer_pb2.DecodeTokensResponse:
        tokenizer = self._tokenizers[_name_of(self._tokenizers, request.model)]
        return await self._workers.run(request.ByteSize(), _decode, tokenizer, request)

    async def GetTokenizerInfo(
        self, request: tokenizer_pb2.GetTokenizerInfoRequest, context: _Context
    ) -> tokenizer_pb2.GetTokenizerInfoResponse:
        infos = [
            tokenizer_pb2.TokenizerInfo(
                model=name,
                vocab_size=tokenizer.vocab_size,
                fingerprint=tokenizer.fingerprint,
                has_chat_template=tokenizer.transformers.chat_template is not None,
            )
            for name, tokenizer in self._tokenizers.items()
        ]
        return tokenizer_pb2.GetTokenizerInfoResponse(
            tokenizers=infos, digest_version=DIGEST_VERSION, digest_key=key_fingerprint(self._digest_key)
        )


def _name_of(served: Mapping[str, object], model: str) -> str:
    """Return the name that a model is served under; an empty name means the only one."""
    if not model and len(served) > 1:
        raise InvalidArgument("model", f"must be named where several are served: {', '.join(sorted(served))}")
    name = model or next(iter(served))
    if name not in served:
        raise NotFound(f"model {model!r} is not served here; served: {', '.join(sorted(served))}")
    return name


def _decode(tokenizer: Tokenizer, request: tokenizer_pb2.DecodeTokensRequest) -> tokenizer_pb2.DecodeTokensResponse:
    check_token_ids("ids", request.token_ids, tokenizer.vocab_size)
    skips_special = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    text = tokenizer.decode(request.token_ids, skip_special_tokens=skips_special)
    return tokenizer_pb2.DecodeTokensResponse(text=text)
