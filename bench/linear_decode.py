"""Whether decoding takes time in proportion to its tokens, of the kind that is hardest: bytes that end no character."""

from __future__ import annotations

import time
from functools import partial

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from kvern.services.detokenizer.incremental_decode import DecoderFactory
from kvern.services.runtime.text import Tokenizer

NUM_TOKENS = 4000
NUM_TRIES = 9


def linear_ratio(tokenizer: Tokenizer) -> float:
    """Return what NUM_TOKENS cost a token, by what a quarter of them cost a token: 1 is linear, 4 quadratic.

    Of a byte-level tokenizer, and of one whose byte tokens are for what it has no other tokens for, the greater.
    """
    byte_level = _ratio(DecoderFactory(tokenizer), tokenizer.backend.get_vocab()["æ"])  # byte E6 in its alphabet
    return max(byte_level, _ratio(DecoderFactory(_byte_fallback()), 0xE6))


def _byte_fallback() -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="a", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), len(vocab), frozenset(), fingerprint="")


def _ratio(factory: DecoderFactory, token_id: int) -> float:
    time_for = partial(_time_s, factory, token_id)
    return time_for(NUM_TOKENS) / time_for(NUM_TOKENS // 4) / 4


def _time_s(factory: DecoderFactory, token_id: int, num_tokens: int) -> float:
    """Return how long a stream of one token takes, the best of several."""
    times = []
    for _ in range(NUM_TRIES):
        decoder = factory.create(skip_special_tokens=True)
        start = time.perf_counter()
        for _ in range(num_tokens):
            decoder.push([token_id])
        decoder.finish()
        times.append(time.perf_counter() - start)
    return min(times)
