"""Control tokens that a user typed stay text.

A chat's template writes control tokens, and users can write the same characters. So typed ones are marked before the
template sees them, and the marks are taken out again after the tokenizer has looked for control tokens and before it
splits text: a typed one then encodes as the text it is, just as any other text.

The vocabularies of some tokenizers spell control tokens like any other piece of text, so that text could turn into one
without being taken for one first. For these there is a copy that cannot.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Set
from typing import Any, TypeVar

from tokenizers import NormalizedString, PreTokenizedString, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kvern.services.runtime.text import Tokenizer
from kvern.services.tokenizer.literals import any_of
from kvern.services.tokenizer.prefix_cache import CachingEncoder

# Two of the code points that Unicode keeps for a program's own use: no text has them.
_START = "\ufdd0"
_END = "\ufdd1"
_MARK = re.compile(f"[{_START}{_END}]")

_Value = TypeVar("_Value")


class ControlTokenGuard:
    """Tells control tokens that a template wrote from those that its variables brought."""

    def __init__(self, tokenizer: Tokenizer, encoder: CachingEncoder) -> None:
        special, written = _control_tokens(tokenizer)
        spelled = _spelled(special | written, tokenizer.backend)
        self._encoder = encoder.for_backend(*_without_spelling(spelled, tokenizer.backend)) if spelled else encoder
        self._special = any_of(special)
        self._all = any_of(special | written)
        self._marked = re.compile(f"{_START}({self._all.pattern}){_END}")
        self._lock = threading.Lock()
        self._guarded: CachingEncoder | None = None

    def mark(self, value: _Value) -> _Value:
        """Mark control tokens in a string, or in all strings of a JSON value. Template code still finds them whole."""
        return self._mark(value, self._all)  # type: ignore[no-any-return]

    def mark_assistant(self, value: _Value) -> _Value:
        """Mark special tokens only: `<think>` and the like are part of what a model says, and templates look for it."""
        return self._mark(value, self._special)  # type: ignore[no-any-return]

    def unmark(self, text: str) -> str:
        """Return a text as it was."""
        return _MARK.sub("", text)

    def encode(self, rendered: str, *, add_special_tokens: bool, scope: str = "") -> list[int]:
        """Encode a template rendered with marked variables. scope: as in `CachingEncoder.encode`."""
        text = self._marked.sub(lambda match: match[1][0] + _START + match[1][1:], rendered)
        encoder = self._encoder if _MARK.search(text) is None else self._guarded_encoder()
        return encoder.encode(text, add_special_tokens=add_special_tokens, scope=scope)

    def _mark(self, value: Any, tokens: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return tokens.sub(f"{_START}\\g<0>{_END}", _MARK.sub("", value))
        if isinstance(value, dict):
            return {self._mark(key, tokens): self._mark(item, tokens) for key, item in value.items()}
        if isinstance(value, list):
            return [self._mark(item, tokens) for item in value]
        return value

    def _guarded_encoder(self) -> CachingEncoder:
        # Made when first needed: it is as large as the tokenizer.
        with self._lock:
            if self._guarded is None:
                self._guarded = self._encoder.for_backend(
                    _without_marks(self._encoder.backend), self._encoder.renumbered
                )
            return self._guarded


def _control_tokens(tokenizer: Tokenizer) -> tuple[set[str], set[str]]:
    """Return the special tokens, and the other added tokens that the chat template writes (`<think>`)."""
    template = tokenizer.transformers.chat_template
    source = template if isinstance(template, str) else " ".join((template or {}).values())
    added = tokenizer.backend.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    return special, {token.content for token in added if token.content in source and not token.content.isspace()}


def _spelled(tokens: Iterable[str], backend: Backend) -> set[str]:
    """Return the tokens that the tokenizer's model makes of their text by itself."""
    model = backend.model
    # The token for what is unknown stands for text anyway, and a model needs it by its name.
    return {
        token
        for token in tokens
        if token != getattr(model, "unk_token", None)
        and [piece.id for piece in model.tokenize(token)] == [backend.token_to_id(token)]
    }


def _without_spelling(tokens: Set[str], backend: Backend) -> tuple[Backend, dict[int, int]]:
    """Return a copy of a tokenizer whose model cannot spell tokens, and which of its ids stand for which of theirs.

    Their pieces are renamed to what no text holds. The added tokens, now apart from them, get new ids: the last ones,
    or others would move.
    """
    description = json.loads(backend.to_str())
    model = description["model"]
    renamed = {token: _START + token for token in tokens}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {renamed.get(piece, piece): id for piece, id in model["vocab"].items()}
    else:
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if tokens.isdisjoint([*pair, "".join(pair)])]
    description["added_tokens"].sort(key=lambda token: token["content"] in tokens)
    copy = Backend.from_str(json.dumps(description))
    ids, new_ids = backend.get_vocab(), copy.get_vocab()
    return copy, {new_ids[token]: ids[token] for token in tokens}


def _without_marks(backend: Backend) -> Backend:
    """Return a copy of a tokenizer that removes marks after it has looked for added tokens."""
    copy = Backend.from_str(backend.to_str())
    steps = [pre_tokenizers.PreTokenizer.custom(_MarkRemover())]
    if backend.pre_tokenizer is not None:
        steps.append(backend.pre_tokenizer)
    copy.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return copy


class _MarkRemover:
    """A pre-tokenizer, because those run after the search for added tokens."""

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        text.normalize(self._remove)

    def _remove(self, text: NormalizedString) -> None:
        text.replace(_START, "")
        text.replace(_END, "")
