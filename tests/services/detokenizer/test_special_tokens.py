from __future__ import annotations

from pathlib import Path

from kvern.services.detokenizer.special_tokens import SpecialTokens
from kvern.services.runtime.text import load_tokenizer
from tests.services import small_tokenizers


def test_stop_string_is_marked_where_it_names_special_tokens(tmp_path: Path) -> None:
    """A07: of two that begin alike, the longer one is meant."""
    backend = small_tokenizers.sentencepiece()
    backend.add_special_tokens(["<s>>"])
    special_tokens = SpecialTokens(load_tokenizer(small_tokenizers.save(backend, tmp_path)))
    marks = special_tokens.mark(["a<s>>b", "</s>", "plain", "<t>"])
    longer, end = marks.get(backend.token_to_id("<s>>")), marks.get(backend.token_to_id("</s>"))
    assert marks.patterns == [(f"a{longer}b", "a<s>>b"), (end, "</s>")]
    assert (len(longer), len(end), marks.get(backend.token_to_id("<s>"))) == (1, 1, "")
    assert marks.remove_from(f"{end}a{longer}b") == "ab"
