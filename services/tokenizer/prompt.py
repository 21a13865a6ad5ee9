"""Prompts to token ids: text, chats, and ids that only need checking."""

from __future__ import annotations

from collections.abc import Sequence

from kvern.engine.block_hash import DEFAULT_KEY, extend_digests, root_digest
from kvern.services.runtime.errors import InvalidArgument
from kvern.services.runtime.text import Tokenizer, check_token_ids
from kvern.services.tokenizer.bad_words import encode_bad_words
from kvern.services.tokenizer.chat import ChatRenderer
from kvern.services.tokenizer.control_tokens import ControlTokenGuard
from kvern.services.tokenizer.prefix_cache import CachingEncoder, PrefixCache
from kvern.v1 import tokenizer_pb2


class PromptEncoder:
    """Encodes the prompts of one model. Threads may share it.

    A text prompt is raw: control tokens written in it are control tokens, so a template rendered elsewhere works. In a
    chat only the template writes control tokens.
    """

    def __init__(self, tokenizer: Tokenizer, cache: PrefixCache, digest_key: bytes = DEFAULT_KEY) -> None:
        self._tokenizer = tokenizer
        self._digest_key = digest_key
        self._encoder = CachingEncoder(tokenizer.backend, cache)
        self._guard = ControlTokenGuard(tokenizer, self._encoder)
        self._renderer = ChatRenderer(tokenizer, self._guard)
        self._added_bos_id = self._find_added_bos()

    def render(self, request: tokenizer_pb2.EncodePromptRequest) -> str:
        """Return the text of a chat. Raises InvalidArgument."""
        return self._renderer.render(request.chat)

    def encode(
        self, request: tokenizer_pb2.EncodePromptRequest, rendered: str | None = None
    ) -> tokenizer_pb2.EncodePromptResponse:
        """Return a prompt's ids, and digests if asked for. Raises InvalidArgument.

        rendered: the text of a chat, where that has been rendered already.
        """
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidArgument("prompt", "missing; give text, chat or token_ids")
        token_ids = self._token_ids(request, rendered)
        if not token_ids:
            raise InvalidArgument(kind, "the prompt has no tokens")
        if request.HasField("keep_last_tokens"):
            if request.keep_last_tokens == 0:
                raise InvalidArgument("keep_last_tokens", "must be at least 1, got 0")
            token_ids = token_ids[-request.keep_last_tokens :]
        return tokenizer_pb2.EncodePromptResponse(
            token_ids=token_ids,
            block_digests=[self._block_digests(hashing, token_ids) for hashing in request.hashings],
            bad_words=encode_bad_words(self._tokenizer, request.bad_words),
        )

    def _token_ids(self, request: tokenizer_pb2.EncodePromptRequest, rendered: str | None) -> list[int]:
        if request.HasField("token_ids"):
            token_ids = list(request.token_ids.ids)
            check_token_ids("token_ids.ids", token_ids, self._tokenizer.vocab_size)
            return token_ids
        if request.HasField("chat"):
            rendered = self.render(request) if rendered is None else rendered
            token_ids = self._guard.encode(rendered, add_special_tokens=request.add_special_tokens, scope=request.scope)
            return self._with_one_bos(token_ids, request.add_special_tokens)
        adds_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        token_ids = self._encoder.encode(request.text, add_special_tokens=adds_special, scope=request.scope)
        return self._with_one_bos(token_ids, adds_special)

    def _with_one_bos(self, token_ids: list[int], adds_special: bool) -> list[int]:
        """Drop the tokenizer's BOS where the text brought its own."""
        is_doubled = adds_special and self._added_bos_id is not None and token_ids[1:2] == [self._added_bos_id]
        return token_ids[1:] if is_doubled else token_ids

    def _find_added_bos(self) -> int | None:
        """Return the BOS that the tokenizer puts before a text, None if it puts none."""
        bos_id = self._tokenizer.transformers.bos_token_id
        return bos_id if self._tokenizer.encode("", add_special_tokens=True)[:1] == [bos_id] else None

    def _block_digests(self, hashing: tokenizer_pb2.BlockHashing, token_ids: Sequence[int]) -> bytes:
        if hashing.block_size == 0:
            raise InvalidArgument("hashings.block_size", "must be at least 1, got 0")
        root = root_digest(hashing.contract, hashing.salt, hashing.adapter, key=self._digest_key)
        return b"".join(extend_digests(root, token_ids, hashing.block_size, key=self._digest_key))
