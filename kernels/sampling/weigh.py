"""What a token is worth in a draw, and the order of logits, as device functions in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from kvern.kernels.sampling import weights

_LOG2_E = tl.constexpr(weights.LOG2_E)
_LEAST_EXPONENT = tl.constexpr(weights.LEAST_EXPONENT)
_EXPONENT_BIAS = tl.constexpr(weights.EXPONENT_BIAS)
_MANTISSA_BITS = tl.constexpr(weights.MANTISSA_BITS)
_C5, _C4, _C3, _C2, _C1, _C0 = (tl.constexpr(coefficient) for coefficient in weights.COEFFICIENTS)

LOWEST_KEY = tl.constexpr(-(2**31) + 0x7FFFFF)
"""Of -inf."""

_LEAST_TEMPERATURE = tl.constexpr(1e-5)


@triton.jit
def token_weights(x, best, temperature, log_min_p):
    """Return weights of logits as whole numbers, as `weights.token_weights` does, 0 below min_p: int64.

    The kernel must be compiled without fused products and sums.
    """
    scaled = tl.div_rn(x - best, tl.zeros_like(x) + temperature)
    exponents = tl.maximum(scaled * _LOG2_E, _LEAST_EXPONENT)
    whole = tl.floor(exponents + 0.5)
    part = exponents - whole
    mantissas = ((((_C5 * part + _C4) * part + _C3) * part + _C2) * part + _C1) * part + _C0
    powers = ((whole.to(tl.int32) + _EXPONENT_BIAS) << _MANTISSA_BITS).to(tl.float32, bitcast=True)
    return tl.where(scaled < log_min_p, 0, (mantissas * powers).to(tl.int64))


@triton.jit
def ordered_keys(x):
    """Map float32 to int32 in the same order. -0.0 counts as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of_key(key):
    """Invert `ordered_keys`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def draws(slot, temperature_ptr):
    """Return whether a row is drawn: neither filling up the batch nor greedy."""
    return (slot >= 0) & (tl.load(temperature_ptr + tl.maximum(slot, 0)) >= _LEAST_TEMPERATURE)


@triton.jit
def has_top_k(top_k, vocab_size):
    """Return whether top_k leaves any token out."""
    return (top_k > 0) & (top_k < vocab_size)
