"""Ids from the cache are those of the whole text, for any text, cut and grown anyhow, with tokenizers of all kinds."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import load_tokenizer
from kvern.services.tokenizer import prefix_cache
from kvern.services.tokenizer.prefix_cache import CachingEncoder, PrefixCache, cut_tokens
from tests.services import small_tokenizers

MAX_BYTES = 1 << 20


def smollm2() -> Backend:
    return load_tokenizer(find_model("smollm2")).backend


MAKERS: list[Callable[[], Backend]] = [
    smollm2,
    small_tokenizers.sentencepiece,
    small_tokenizers.metaspace,
    small_tokenizers.wordpiece,
    small_tokenizers.byte_level,
    small_tokenizers.many_added_tokens,
]


@pytest.fixture(scope="module", params=MAKERS, ids=lambda maker: maker.__name__)
def backend(request: pytest.FixtureRequest) -> Backend:
    made: Backend = request.param()
    return made


@pytest.fixture(scope="module")
def short_parts() -> Iterator[None]:
    """Cut wherever a cut can be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "MIN_PART_CHARS", 1)
        yield


def ids_of(backend: Backend, text: str, *, add_special_tokens: bool) -> list[int]:
    return backend.encode(text, add_special_tokens=add_special_tokens).ids


def pieces_of(backend: Backend) -> st.SearchStrategy[str]:
    """Added tokens, whole and torn, and what tokenizers look at beside them."""
    contents = [token.content for token in backend.get_added_tokens_decoder().values()][-40:]
    torn = st.sampled_from(contents).flatmap(lambda token: st.integers(0, len(token)).map(lambda at: token[:at]))
    rest = st.sampled_from(contents).flatmap(lambda token: st.integers(0, len(token)).map(lambda at: token[at:]))
    plain = st.sampled_from(
        ["a", "b", "ab", " ", "  ", "\n", "\n\n", "_", "▁", "日", "<", ">", "<W>", "<w>", "e\u0301"]
    )
    return st.one_of(st.sampled_from(contents), plain, torn, rest, st.text(max_size=3))


@pytest.mark.usefixtures("short_parts")
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ids_of_a_growing_text_are_those_of_the_whole(backend: Backend, data: st.DataObject) -> None:
    encoder = CachingEncoder(backend, PrefixCache(data.draw(st.sampled_from([0, 1000, MAX_BYTES]))))
    text = ""
    for turn in data.draw(st.lists(st.lists(pieces_of(backend), max_size=8).map("".join), max_size=5)):
        text += turn
        for adds_special in (True, False):
            expected = ids_of(backend, text, add_special_tokens=adds_special)
            assert encoder.encode(text, add_special_tokens=adds_special) == expected


@pytest.mark.usefixtures("short_parts")
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_ids_of_texts_that_begin_alike_are_those_of_the_whole(backend: Backend, data: st.DataObject) -> None:
    encoder = CachingEncoder(backend, PrefixCache(MAX_BYTES))
    text = "".join(data.draw(st.lists(pieces_of(backend), max_size=20)))
    for cut in data.draw(st.lists(st.integers(0, len(text)), max_size=4)):
        other = text[:cut] + "".join(data.draw(st.lists(pieces_of(backend), max_size=6)))
        assert encoder.encode(other, add_special_tokens=True) == ids_of(backend, other, add_special_tokens=True)


def test_texts_are_cut_before_the_tokens_of_chat_templates() -> None:
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= set(cut_tokens(smollm2()))
    for make in MAKERS[1:]:
        assert "</s>" in cut_tokens(make())


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<x>", normalized=True),
        AddedToken("<x>", normalized=False, lstrip=True),
        AddedToken("<x>", normalized=False, single_word=True),
        AddedToken("x>", normalized=False),  # belongs to a word, by which an added token before it may be judged
        AddedToken(" <x>", normalized=False),  # an added token before it may take its space
        AddedToken("<|", normalized=False),  # a part of another one
        AddedToken("|><", normalized=False),  # may begin in another one
        AddedToken("<<", normalized=False),  # and in itself
    ],
    ids=str,
)
def test_text_is_not_cut_where_the_tokenizer_may_see_something_else(token: AddedToken) -> None:
    backend = small_tokenizers.sentencepiece()
    backend.add_tokens([AddedToken("<|other|>", normalized=False), token])
    assert token.content not in cut_tokens(backend)


def test_text_is_not_cut_where_control_tokens_are_not_searched_or_splits_are_drawn() -> None:
    backend = small_tokenizers.sentencepiece()
    backend.encode_special_tokens = True
    assert cut_tokens(backend) == []
    random = small_tokenizers.sentencepiece()
    random.model = models.BPE(vocab=random.get_vocab(), merges=[], dropout=0.5)
    assert cut_tokens(random) == []
    without = Backend(models.BPE(vocab={"a": 0, "<": 1}, merges=[]))
    encoder = CachingEncoder(without, PrefixCache(MAX_BYTES))
    assert encoder.encode("a<a", add_special_tokens=True) == [0, 1, 0]


class Recorder:
    """A tokenizer that keeps what it encodes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.texts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], **options: bool) -> Any:
        self.texts += texts
        return self._backend.encode_batch_fast(texts, **options)


def turn(number: int) -> str:
    return f"<|im_start|>user\nQuestion {number}. {'words ' * 400}<|im_end|>\n"


def test_beginning_that_came_before_is_not_encoded_again() -> None:
    recorder = Recorder(smollm2())
    encoder = CachingEncoder(recorder, PrefixCache(MAX_BYTES))  # type: ignore[arg-type]
    text = "".join(map(turn, range(20)))
    first = encoder.encode(text, add_special_tokens=False)
    recorder.texts.clear()
    grown = encoder.encode(text + turn(20), add_special_tokens=False)
    assert grown[: len(first)] == first
    assert sum(map(len, recorder.texts)) < 3 * len(turn(20))


def test_beginning_that_came_with_other_tokenizers_is_encoded() -> None:
    """Two tokenizers of one cache share no ids."""
    cache = PrefixCache(MAX_BYTES)
    text = "</s>ab日" * 400
    encoders = [(backend, CachingEncoder(backend, cache)) for backend in (make() for make in MAKERS)]
    for backend, encoder in encoders:
        assert encoder.encode(text, add_special_tokens=True) == ids_of(backend, text, add_special_tokens=True)


def test_cache_keeps_what_was_used_last_within_its_bytes() -> None:
    room = 3 * (prefix_cache.ENTRY_BYTES + 149 + 40)  # of a string of 100 characters and of 10 ids
    cache = PrefixCache(room)
    ids = array("I", range(10))
    keys = [(None, f"{number:100}") for number in range(4)]
    for key in keys[:3]:
        cache.put(key, ids)
    assert cache.get(keys[0]) == ids
    cache.put(keys[3], ids)
    assert [cache.get(key) is not None for key in keys] == [True, False, True, True]
    assert cache.num_bytes <= room
    cache.put((None, "x" * room), ids)
    assert cache.get(keys[3]) == ids


@pytest.mark.usefixtures("short_parts")
def test_threads_share_a_cache_that_is_always_full() -> None:
    backend = small_tokenizers.byte_level()
    cache = PrefixCache(20_000)
    encoder = CachingEncoder(backend, cache)
    texts = ["".join(f"<s>{'ab' * (start + number)}</s>" for number in range(40)) for start in range(8)]
    expected = [ids_of(backend, text, add_special_tokens=True) for text in texts]
    begin = threading.Barrier(4)

    def work(offset: int) -> None:
        begin.wait()
        for number in range(offset, offset + 40):
            index = number % len(texts)
            assert encoder.encode(texts[index], add_special_tokens=True) == expected[index]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert 0 < cache.num_bytes <= 20_000


def test_text_of_another_scope_is_not_found() -> None:
    """How long a text takes tells a tenant nothing of what others sent."""
    backend, cache = small_tokenizers.byte_level(), PrefixCache(MAX_BYTES)
    backend.add_special_tokens(["<|cut|>"])
    encoder = CachingEncoder(backend, cache)
    text = "a" * 2000 + "<|cut|>b"
    encoder.encode(text, add_special_tokens=False, scope="one")
    assert cache.hit_bytes == 0
    other = encoder.encode(text, add_special_tokens=False, scope="other")
    assert cache.hit_bytes == 0
    assert encoder.encode(text, add_special_tokens=False, scope="one") == other
    assert cache.hit_bytes == 2000
