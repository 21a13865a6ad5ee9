"""Tokenizers of kinds other than the small model's, made by hand."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvern.services.runtime.model_source import ModelSource

SPECIAL = ["<unk>", "<s>", "</s>"]


def sentencepiece() -> Tokenizer:
    """Spaces are `▁`, one is put before a text and dropped before its first token; unknown characters are bytes."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*SPECIAL, *byte_tokens, "▁", "▁▁", "a", "b", "日", "▁a", "▁b", "ab", "▁ab", "\ufffd"]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [("▁", "▁"), ("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_special_tokens(backend)


def metaspace() -> Tokenizer:
    """SentencePiece's unigram kind, as transformers wrote it before."""
    tokens = [*SPECIAL, "▁", "a", "b", "▁a", "▁ab", "日"]
    backend = Tokenizer(models.Unigram([(token, -float(number)) for number, token in enumerate(tokens)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _with_special_tokens(backend)


def wordpiece() -> Tokenizer:
    """Words are joined with spaces, `##` marks their later parts, and punctuation pulls up to them."""
    tokens = [*SPECIAL, "a", "ab", "##b", "##日", ".", ",", "'", "s", "n't", "do"]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _with_special_tokens(backend)


def byte_level() -> Tokenizer:
    """Words split as GPT-2's, with a space put before each text; NFC; sequences begin and end with special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, "Ġa", "ab", "Ġab", "ĊĊ"]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [("Ġ", "a"), ("a", "b"), ("Ġa", "b"), ("Ċ", "Ċ")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    _with_special_tokens(backend)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    return backend


def many_added_tokens() -> Tokenizer:
    """Added tokens of all sorts: parts of others, spaces, letters, some that take spaces or are whole words only."""
    vocab = {token: number for number, token in enumerate([*SPECIAL, *"abcdef<>|[] ", "ab", "日"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")], unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="_", prepend_scheme="first")
    backend.decoder = decoders.Fuse()
    backend.add_tokens([AddedToken(f"<extra_{number}>", normalized=False) for number in range(300)])
    overlapping = ["  ", "\n\n", "[a", "[a]", "a>", "|<extra_1", "[e]", "c[e]d", "d>"]
    backend.add_tokens([AddedToken(token, normalized=False) for token in overlapping])
    backend.add_tokens([AddedToken("<l>", normalized=False, lstrip=True), AddedToken("<W>", normalized=True)])
    backend.add_tokens([AddedToken("<r>", normalized=False, rstrip=True)])
    backend.add_tokens([AddedToken(token, normalized=False, single_word=True) for token in ("<w>", "a|", "word")])
    return _with_special_tokens(backend)


def _with_special_tokens(backend: Tokenizer) -> Tokenizer:
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken("<t>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return backend


def save(backend: Tokenizer, folder: Path) -> ModelSource:
    """Write a tokenizer as a model's folder has it."""
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return ModelSource(folder, folder.name)
