"""A byte-level tokenizer small enough to list what a grammar allows."""

from __future__ import annotations

import string

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<pad>", "<s>", "</s>"]
EOS = SPECIAL.index("</s>")
_SPACE = "Ġ"  # how the byte-level alphabet writes a space
_MERGES = [("a", "b"), ("t", "r"), ("tr", "u"), ("tru", "e"), ('"', ":"), (_SPACE, "a")]

TOKENS = [
    *SPECIAL,
    *string.ascii_lowercase,
    *string.digits,
    *'"{}[]():,.-_<>/=\\|?+*',
    _SPACE,
    *"Ã¤",  # the two bytes of ä
    *("".join(pair) for pair in _MERGES),
]


def make_tokenizer() -> Tokenizer:
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(TOKENS)}, _MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return backend
