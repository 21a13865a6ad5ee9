"""The tokens that engines are compared with are those of transformers, which reads the same file."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import gguf
import pytest

from .reference import likeliest_tokens, load_reference_model, prompt_ids


@pytest.fixture(autouse=True)
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads the header three times, and makes the map of tensors' names anew for each module."""
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, cache(getattr(gguf, name)))


def test_reference_tokens_are_the_likeliest_of_transformers(
    smollm2_path: Path, reference_tokens: dict[tuple[int, ...], list[int]]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_reference_model(smollm2_path)
        assert list(reference_tokens) == prompt_ids(smollm2_path)
    for prompt, tokens in reference_tokens.items():
        assert likeliest_tokens(model, prompt, tokens) == tokens
