"""The program that a CPU runs a decoder as, beside the modules that it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvern.engine.model.cpu_decoder import CpuDecoder, compile_decoder
from kvern.engine.model.language_model import Forward, LanguageModel
from kvern.engine.model.loader import LoadedModel
from kvern.engine.model.ops import choose_ops
from kvern.kernels.cpu import HAS_BF16

from .test_model_families import NATIVE
from .tiny_llama import load
from .tiny_models import PROMPT, generate, paged_logits, save_tiny

pytestmark = pytest.mark.skipif(not HAS_BF16, reason="this CPU does not multiply bfloat16")


SIZES = {"hidden_size": 64, "intermediate_size": 96}
"""Which kernels for bfloat16 multiply."""


def load_case(path: Path, case: str, **options: Any) -> LoadedModel:
    name, config = NATIVE[case]
    save_tiny(path, name, **SIZES | config)
    model = load(path, dtype="bfloat16", **options)
    model.module.use(choose_ops(model.dtype, device=torch.device("cpu"), uses_triton=False))
    return model


def compiled(module: LanguageModel, kv: Tensor, max_num_tokens: int) -> Forward:
    program = compile_decoder(module, kv, max_num_tokens)
    assert isinstance(program, CpuDecoder)
    return program


@pytest.mark.parametrize(
    ("case", "quantization"),
    [
        ("llama, biases, tied", None),
        ("qwen2, windows", None),
        ("smollm3", "int8"),
        ("phi3, partial rotary", "int4"),
    ],
)
@torch.inference_mode()
def test_program_gives_the_bits_of_its_modules(tmp_path: Path, case: str, quantization: str | None) -> None:
    """In steps of one size after another: whole, of some tokens, of one."""
    model = load_case(tmp_path, case, quantization=quantization)
    for chunk in (len(PROMPT), 7, 1):
        logits = paged_logits(model, chunk, compiled=compiled)
        assert torch.equal(logits, paged_logits(model, chunk))
        assert torch.isfinite(logits).all()


@pytest.mark.parametrize("case", ["gemma2", "mixtral", "qwen3"])
def test_model_with_other_parts_stays_as_it_is(tmp_path: Path, case: str) -> None:
    model = load_case(tmp_path, case)
    assert compile_decoder(model.module, torch.empty(1, dtype=torch.bfloat16), 8) is model.module


def test_runner_computes_with_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, call = [], CpuDecoder.__call__

    def count(decoder: CpuDecoder, token_ids: Tensor, *rest: Any) -> Tensor:
        calls.append(len(token_ids))
        return call(decoder, token_ids, *rest)

    monkeypatch.setattr(CpuDecoder, "__call__", count)
    generate(load_case(tmp_path, "qwen2, windows"), num_tokens=3, chunk=len(PROMPT))
    assert calls == [2 * len(PROMPT) - 8, 2, 2]  # two requests, one of them shorter
