"""GGUF tensors of types that only llama.cpp writes: bytes made by hand, beside the formulas of its sources.

Source: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-quants.c (dequantize_row_q4_K and so on).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from .tiny_gguf import SUPERBLOCK, gguf_tensors, metadata_of, random_blocks, write_gguf
from .tiny_llama import load
from .tiny_models import expected_logits, paged_logits, save_tiny


def _half(block: bytes, offset: int) -> float:
    value: float = struct.unpack_from("<e", block, offset)[0]
    return value


def _scale_and_min(packed: bytes, place: int) -> tuple[int, int]:
    """Two of the eight pairs of 6-bit numbers in 12 bytes."""
    if place < 4:
        return packed[place] & 63, packed[place + 4] & 63
    scale = packed[place + 4] & 15 | packed[place - 4] >> 6 << 4
    return scale, packed[place + 4] >> 4 | packed[place] >> 6 << 4


def q4_k(block: bytes) -> Iterator[float]:
    scale, minimum, packed, quants = _half(block, 0), _half(block, 2), block[4:16], block[16:]
    for part in range(8):
        factor, offset = _scale_and_min(packed, part)
        for byte in quants[part // 2 * 32 : part // 2 * 32 + 32]:
            yield scale * factor * (byte >> part % 2 * 4 & 15) - minimum * offset


def q5_k(block: bytes) -> Iterator[float]:
    scale, minimum, packed, high, quants = _half(block, 0), _half(block, 2), block[4:16], block[16:48], block[48:]
    for part in range(8):
        factor, offset = _scale_and_min(packed, part)
        for place, byte in enumerate(quants[part // 2 * 32 : part // 2 * 32 + 32]):
            quant = (byte >> part % 2 * 4 & 15) + (high[place] >> part & 1) * 16
            yield scale * factor * quant - minimum * offset


def q6_k(block: bytes) -> Iterator[float]:
    low, high, factors, scale = block[:128], block[128:192], block[192:208], _half(block, 208)
    for part in range(8):
        half, row = divmod(part, 4)
        for place in range(32):
            nibble = low[half * 64 + row % 2 * 32 + place] >> row // 2 * 4 & 15
            quant = (nibble | (high[half * 32 + place] >> row * 2 & 3) << 4) - 32
            factor = struct.unpack_from("<b", factors, half * 8 + row * 2 + place // 16)[0]
            yield scale * factor * quant


FORMULAS: dict[str, Callable[[bytes], Iterator[float]]] = {"Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k}
"""By type, for one block."""


def dequantized(kind: str, rows: np.ndarray, width: int) -> np.ndarray:
    blocks = rows.reshape(len(rows) * width // SUPERBLOCK, -1)
    return np.array([list(FORMULAS[kind](bytes(block))) for block in blocks], dtype=np.float32).reshape(-1, width)


@pytest.mark.parametrize("kind", FORMULAS)
def test_matrices_are_dequantized_as_llama_cpp_does(tmp_path: Path, kind: str) -> None:
    """I08."""
    shape = {"vocab_size": 113, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    model = save_tiny(tmp_path / "hf", "Qwen2", **shape)
    tensors = gguf_tensors(model, "qwen2")
    written = {}
    for part in ("gate", "up", "down"):
        weight = model.get_parameter(f"model.layers.0.mlp.{part}_proj.weight")
        rows = random_blocks(kind, (256, 256))
        with torch.no_grad():
            weight.copy_(torch.from_numpy(dequantized(kind, rows, 256)))
        written[f"blk.0.ffn_{part}.weight"] = rows
    path = tmp_path / "model.gguf"
    write_gguf(path, tensors, metadata=metadata_of(model, "qwen2"), raw={gguf.GGMLQuantizationType[kind]: written})
    assert weight.abs().mean() > 0.005
    torch.testing.assert_close(paged_logits(load(path), 7), expected_logits(model), atol=1e-4, rtol=1e-4)
