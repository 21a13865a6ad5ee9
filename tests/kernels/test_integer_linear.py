"""Weights in groups of integers: how they are rounded, and products with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numba
import numpy as np
import pytest
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from kvern.kernels.linear import integer_kernel
from kvern.kernels.linear.groups import GROUP, Groups, in_4_bits, in_8_bits
from kvern.kernels.linear.integer import IntegerWeight

ROUND = {8: in_8_bits, 4: in_4_bits}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def restored(groups: Groups) -> Tensor:
    """Return [out, in] float32."""
    weight = groups.values.float() * groups.scales.float()
    return (weight if groups.minima is None else weight + groups.minima.float()).flatten(1)


@pytest.mark.parametrize("bits", ROUND)
def test_rounded_weight_differs_by_half_a_step_at_most(bits: int) -> None:
    """And by what float16 makes of the scale, which counts most at the far end, and of the minimum."""
    weight = random(48, 96) * torch.logspace(-2, 2, 48)[:, None]
    groups = ROUND[bits](weight)
    error = (restored(groups) - weight).abs().view(groups.values.shape)
    extent = weight.view(groups.values.shape).abs().amax(2, keepdim=True)
    assert (error <= 0.5 * groups.scales.float() + extent * 2**-9).all()
    assert (groups.values.min(), groups.values.max()) == {8: (-127, 127), 4: (0, 15)}[bits]


@pytest.mark.parametrize("bits", ROUND)
def test_group_of_equal_weights_is_kept(bits: int) -> None:
    for value in (0.0, 0.5, -0.25):
        weight = torch.full((1, GROUP), value)
        torch.testing.assert_close(restored(ROUND[bits](weight)), weight, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("bits", "kind"), [(8, gguf.GGMLQuantizationType.Q8_0), (4, gguf.GGMLQuantizationType.Q4_1)])
def test_weight_that_llama_cpp_rounded_comes_out_as_it_was(bits: int, kind: gguf.GGMLQuantizationType) -> None:
    stored = torch.from_numpy(gguf.dequantize(gguf.quantize(random(64, 96).numpy(), kind), kind))
    torch.testing.assert_close(restored(ROUND[bits](stored)), stored, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bits", ROUND)
def test_product_equals_its_definition_in_float64(bits: int, dtype: torch.dtype) -> None:
    """Of numbers of outputs that fill whole tiles and that do not, with a bias and without, and of strided tokens."""
    for num_tokens, out_features, in_features in ((1, 64, 32), (7, 70, 96), (0, 64, 32)):
        groups = ROUND[bits](random(out_features, in_features) / in_features**0.5)
        x = random(num_tokens, 2 * in_features, seed=1).to(dtype)[:, in_features:]
        weight = IntegerWeight(groups)
        assert (weight.out_features, weight.in_features) == (out_features, in_features)
        for bias in (None, random(out_features, seed=2).to(dtype)):
            product = weight.product(x, bias)
            assert product.dtype is dtype
            expected = x.double() @ restored(groups).double().T + (0 if bias is None else bias.double())
            torch.testing.assert_close(product.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", ROUND)
def test_token_has_the_same_bits_in_every_batch(bits: int, dtype: torch.dtype) -> None:
    """D17: what a request draws must not depend on who else is served."""
    weight, x = IntegerWeight(ROUND[bits](random(576, 1536))), random(67, 1536, seed=1).to(dtype)
    whole = weight.product(x, None)
    for begin, count in ((0, 1), (6, 1), (66, 1), (0, 2), (3, 3), (5, 4), (1, 33), (60, 7)):
        assert torch.equal(weight.product(x[begin : begin + count], None), whole[begin : begin + count])


def test_memory_is_that_of_bits_and_scales() -> None:
    assert IntegerWeight(in_8_bits(random(128, 64))).nbytes == 128 * 64 * (1 + 2 / GROUP)
    assert IntegerWeight(in_4_bits(random(128, 64))).nbytes == 128 * 64 * (0.5 + 4 / GROUP)


def unpacked(array: Any, emitted: Callable[[integer_kernel._Emitter, Any], list[Any]]) -> Tensor:
    """Return what the emitter makes of 64 bytes, vector after vector, as float32."""

    @intrinsic
    def emit(typing: Any, source: Any, out: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emitter = integer_kernel._Emitter(context, builder)
            first = cgutils.intp_t(0)
            loaded = emitter.load(integer_kernel._BYTES, emitter.pointer(source, arguments[0], first))
            for place, vector in enumerate(emitted(emitter, loaded)):
                emitter.store(vector, emitter.pointer(out, arguments[1], first, 32 * place))
            return context.get_dummy_value()

        return types.void(source, out), generate

    @numba.njit
    def run(source: Any, out: Any) -> None:
        emit(source, out)

    words = np.zeros(128, np.uint16)
    run(array, words)
    return (torch.from_numpy(words.astype(np.int32)) << 16).view(torch.float32)


@pytest.mark.parametrize("has_lookup", [False, True])
def test_integers_are_unpacked_exactly_with_a_lookup_and_without(
    has_lookup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_lookup and not (integer_kernel._HAS_BYTE_LOOKUP and integer_kernel._HAS_WORD_LOOKUP):
        pytest.skip("this CPU looks nothing up in registers")
    monkeypatch.setattr(integer_kernel, "_HAS_BYTE_LOOKUP", has_lookup)
    monkeypatch.setattr(integer_kernel, "_HAS_WORD_LOOKUP", has_lookup)
    for start in range(0, 256, 64):
        stored = np.arange(start, start + 64, dtype=np.uint8)
        found = unpacked(stored, lambda emitter, loaded: list(emitter.bytes(loaded)))[:64]
        magnitudes = torch.from_numpy(stored & 127).float() * (-1 if start >= 128 else 1)
        assert torch.equal(found, magnitudes.view(4, 2, 8).transpose(0, 1).reshape(64))

    def nibbles(emitter: integer_kernel._Emitter, loaded: Any) -> list[Any]:
        words = emitter._builder.bitcast(loaded, integer_kernel._PAIRS)
        return [emitter.nibbles(words, place) for place in range(4)]

    words = np.arange(0, 65536, 2041, dtype=np.uint16)[:32]
    expected = torch.tensor([[word >> 4 * place & 15 for word in words.tolist()] for place in range(4)])
    assert torch.equal(unpacked(words.view(np.uint8), nibbles), expected.flatten().float())
