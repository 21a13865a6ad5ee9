"""The tokens that engines are compared with are those of transformers, which reads the same file."""

from __future__ import annotations

import warnings
from pathlib import Path

from .reference import likeliest_tokens, load_reference_model, prompt_ids


def test_reference_tokens_are_the_likeliest_of_transformers(
    smollm2_path: Path, reference_tokens: dict[tuple[int, ...], list[int]]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_reference_model(smollm2_path)
        assert list(reference_tokens) == prompt_ids(smollm2_path)
    for prompt, tokens in reference_tokens.items():
        assert likeliest_tokens(model, prompt, tokens) == tokens
