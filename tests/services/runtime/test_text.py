from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from kvern.services.runtime.errors import InvalidArgument
from kvern.services.runtime.model_source import ModelSource, find_model
from kvern.services.runtime.text import TokenizerError, check_token_ids, load_tokenizer
from tests.services import small_tokenizers

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces and\ttabs\n\n1. a list\r\n",
    "don't they'll I'VE",
    "1234567890 3.14 १२३ ²½",
    "héllo naïve ďábel 日本語のテキスト 한국어 ไทย",
    "👨‍👩‍👧‍👦 🇨🇭 e\u0301 \u200b\ufeff",
    "def f(x):\n    return {'a': [1, 2]}  # <|im_start|>",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>",
    "\0\x01\x7f\ufffd\U0010ffff",
]


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(find_model("smollm2"))


@pytest.fixture(scope="module")
def reference():
    path = find_model("smollm2").path
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = reference.backend_tokenizer
    # As in the model's tokenizer.json; transformers leaves it out for a GGUF.
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return reference


def test_gguf_tokenizer_of_smollm_splits_off_each_digit(smollm2) -> None:
    for before, digits in (("one:\n\n", "1"), ("a   ", "12"), ("", "2024")):
        apart = [id for part in (before, *digits) for id in smollm2.encode(part, add_special_tokens=False)]
        assert smollm2.encode(before + digits, add_special_tokens=False) == apart


@pytest.fixture
def directory(reference, tmp_path: Path) -> ModelSource:
    reference.save_pretrained(tmp_path)
    return ModelSource(tmp_path, "saved")


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_tokenizer_encodes_and_decodes_as_transformers(smollm2, reference, text: str) -> None:
    for add_special_tokens in (True, False):
        ids = smollm2.encode(text, add_special_tokens=add_special_tokens)
        assert ids == reference.encode(text, add_special_tokens=add_special_tokens)
    for skip_special_tokens in (True, False):
        decoded = smollm2.decode(ids, skip_special_tokens=skip_special_tokens)
        assert decoded == reference.decode(ids, skip_special_tokens=skip_special_tokens)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_gguf_tokenizer_encodes_any_text_as_transformers(smollm2, reference, text: str) -> None:
    assert smollm2.encode(text, add_special_tokens=True) == reference.encode(text)


@settings(deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=20))
def test_gguf_tokenizer_decodes_any_ids_as_transformers(smollm2, reference, ids: list[int]) -> None:
    assert smollm2.decode(ids, skip_special_tokens=False) == reference.decode(ids)


def test_gguf_tokenizer_has_the_special_tokens_and_chat_template_of_transformers(smollm2, reference) -> None:
    assert smollm2.transformers.special_tokens_map == reference.special_tokens_map
    assert smollm2.transformers.chat_template == reference.chat_template
    assert smollm2.special_ids == set(range(17))
    assert smollm2.vocab_size == len(reference) == 49152


def test_directory_tokenizer_is_the_one_that_was_saved(smollm2, directory: ModelSource) -> None:
    loaded = load_tokenizer(directory)
    for text in TEXTS:
        assert loaded.encode(text, add_special_tokens=True) == smollm2.encode(text, add_special_tokens=True)
    assert loaded.transformers.chat_template == smollm2.transformers.chat_template
    assert (loaded.vocab_size, loaded.special_ids) == (smollm2.vocab_size, smollm2.special_ids)


def test_directory_tokenizer_that_truncates_and_pads_does_neither_here(directory: ModelSource) -> None:
    file = directory.path / "tokenizer.json"
    backend = Backend.from_file(str(file))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(file))
    loaded = load_tokenizer(directory)
    assert len(loaded.encode("one two three four five six", add_special_tokens=True)) == 6
    assert len(loaded.encode("one", add_special_tokens=True)) == 1


def test_sentencepiece_directory_adds_bos_and_decodes_as_auto_tokenizer(tmp_path: Path) -> None:
    """A05: the space before the first word is dropped exactly where the tokenizer drops it."""
    loaded = load_tokenizer(small_tokenizers.save(small_tokenizers.sentencepiece(), tmp_path))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode("ab a", add_special_tokens=True) == reference.encode("ab a")
    assert loaded.encode("ab a", add_special_tokens=True)[0] == 1
    space, word = (loaded.backend.token_to_id(token) for token in ("▁", "▁a"))
    for ids in ([space], [word], [word, space], [1, word, word, 2]):
        assert loaded.decode(ids, skip_special_tokens=True) == reference.decode(ids, skip_special_tokens=True)


@pytest.fixture(
    scope="module",
    params=[
        small_tokenizers.sentencepiece,
        small_tokenizers.metaspace,
        small_tokenizers.wordpiece,
        small_tokenizers.byte_level,
        small_tokenizers.many_added_tokens,
    ],
    ids=lambda make: make.__name__,
)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A tokenizer of another kind than the small model's, beside what transformers makes of its files."""
    folder = tmp_path_factory.mktemp("kind")
    return load_tokenizer(small_tokenizers.save(request.param(), folder)), AutoTokenizer.from_pretrained(folder)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(["ab", " ", "<t>", "</s>", "\n", "日"]), st.text(max_size=5))).map("".join))
def test_tokenizers_of_all_kinds_encode_any_text_as_transformers(kind, text: str) -> None:
    loaded, reference = kind
    for adds_special in (True, False):
        expected = reference.encode(text, add_special_tokens=adds_special)
        assert loaded.encode(text, add_special_tokens=adds_special) == expected


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_tokenizers_of_all_kinds_decode_any_ids_as_transformers(kind, data: st.DataObject) -> None:
    loaded, reference = kind
    ids = data.draw(st.lists(st.integers(0, loaded.vocab_size - 1), max_size=20))
    for skips_special in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skips_special)
        assert loaded.decode(ids, skip_special_tokens=skips_special) == expected


def test_fingerprint_follows_the_files(directory: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> None:
    first = load_tokenizer(directory)
    copy = ModelSource(tmp_path_factory.mktemp("copy"), "copy")
    shutil.copytree(directory.path, copy.path, dirs_exist_ok=True)
    assert load_tokenizer(copy).fingerprint == first.fingerprint
    (copy.path / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(copy).fingerprint != first.fingerprint


def write_gguf(path: Path, **tokenizer: object) -> ModelSource:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in tokenizer.items():
        name = f"tokenizer.ggml.{key}"
        writer.add_array(name, value) if isinstance(value, list) else writer.add_string(name, str(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return ModelSource(path, "made")


def test_gguf_of_sentencepiece_kind_loads(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a"]
    source = write_gguf(
        tmp_path / "spm.gguf", model="llama", tokens=tokens, scores=[0.0] * 6 + [1.0], token_type=[2, 3, 3, 1, 1, 1, 1]
    )
    loaded = load_tokenizer(source)
    assert loaded.decode(loaded.encode("ab a", add_special_tokens=False), skip_special_tokens=True) == "ab a"


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({}, "holds no tokenizer"),
        ({"model": "rwkv", "tokens": ["a"]}, "rwkv"),
        ({"model": "gpt2", "pre": "martian", "tokens": ["a"], "merges": []}, "martian"),
    ],
)
def test_gguf_with_a_tokenizer_of_unknown_kind_is_refused_naming_it(
    tmp_path: Path, tokenizer: dict[str, object], message: str
) -> None:
    source = write_gguf(tmp_path / "odd.gguf", **tokenizer)
    with pytest.raises(TokenizerError, match=message) as refusal:
        load_tokenizer(source)
    assert str(source.path) in str(refusal.value)


def test_damaged_files_are_refused_naming_their_path(tmp_path: Path, directory: ModelSource) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(find_model("smollm2").path.read_bytes()[:100_000])
    with pytest.raises(TokenizerError, match=r"bad\.gguf"):
        load_tokenizer(ModelSource(bad, "bad"))
    file = directory.path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": {"type": "Nonsense"}}))
    with pytest.raises(TokenizerError, match=str(directory.path)):
        load_tokenizer(directory)


def test_directory_without_tokenizer_files_is_refused_naming_it(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        load_tokenizer(ModelSource(tmp_path, "empty"))


@pytest.mark.parametrize("service", ["tokenizer", "detokenizer"])
def test_services_that_load_tokenizers_import_no_torch(service: str, directory: ModelSource) -> None:
    code = f"""
import sys
from pathlib import Path
import kvern.services.{service}.__main__
from kvern.services.runtime.model_source import ModelSource, find_model
from kvern.services.runtime.text import load_tokenizer
load_tokenizer(find_model("smollm2"))
load_tokenizer(ModelSource(Path({str(directory.path)!r}), "saved"))
print("torch" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"


def test_first_id_beyond_the_vocabulary_is_named() -> None:
    """B09."""
    check_token_ids("ids", [], 10)
    check_token_ids("ids", [0, 9], 10)
    with pytest.raises(InvalidArgument, match=r"ids\[1\]: must be below the vocabulary's size, 10, got 10"):
        check_token_ids("ids", [9, 10, 2**32 - 1], 10)
