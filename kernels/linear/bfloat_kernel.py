"""Products in bfloat16, compiled by numba to a CPU's vector instructions.

The unit of work is a tile: up to 12 tokens by 32 outputs, its sums in registers, to which each instruction (VDPBF16PS)
adds the products of two inputs. Every tile height adds up in the order of the inputs, so a token's result has the same
bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvern.kernels.cpu import BFloat, compiled, integers, take, thread_kernel

WIDTH = 32
"""Outputs of a tile."""

STEP = 8
"""Inputs that are multiplied between two looks at the loop's counter."""

_LANES = 16
_COLUMNS = WIDTH // _LANES
_LINE = 64
"""Bytes of a cache's line."""

_AHEAD = 16384
"""Bytes of weights between those that are multiplied and those that are fetched."""

_CHUNK = 96
"""Most tokens that are multiplied with a block of weights before the next block."""

_PARTS = 32
"""Of a product, about, that threads take one at a time: what one does slowly, others do."""

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS = ir.VectorType(_F32, _LANES)
_LANES_I32 = ir.VectorType(_I32, _LANES)
_PAIRS = ir.VectorType(_I16, 2 * _LANES)

_BFLOATS = ir.VectorType(BFloat(), _LANES)
_BFLOAT_PAIRS = ir.VectorType(BFloat(), 2 * _LANES)


class _Tile:
    """Emits the product of a tile."""

    def __init__(self, builder: Any, rows: int) -> None:
        self._builder, self._rows = builder, rows
        zero = ir.Constant(_FLOATS, [0.0] * _LANES)
        self._sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows * _COLUMNS)]
        for total in self._sums:
            builder.store(zero, total)

    def add_products(self, x: Any, x_stride: Any, weights: Any, num_inputs: Any) -> None:
        """x, weights: addresses; x_stride: bytes from one token to the next."""
        builder = self._builder
        rows = [x]
        while len(rows) < self._rows:
            rows.append(builder.add(rows[-1], x_stride))
        with cgutils.for_range_slice(builder, _constant(0), num_inputs, _constant(STEP)) as (index, _):
            at = builder.mul(index, _constant(2))
            step = builder.add(weights, builder.mul(index, _constant(2 * WIDTH)))
            for line in range(0, STEP * 2 * WIDTH, _LINE):
                self._prefetch(step, _AHEAD + line)
            for pair in range(STEP // 2):
                loaded = [
                    self._load(_BFLOAT_PAIRS, step, (pair * _COLUMNS + column) * 4 * _LANES)
                    for column in range(_COLUMNS)
                ]
                for row, address in enumerate(rows):
                    inputs = self._spread(self._load(_I32, builder.add(address, at), 4 * pair))
                    for column, vector in enumerate(loaded):
                        self._add_product(row * _COLUMNS + column, inputs, vector)

    def _add_product(self, place: int, inputs: Any, weights: Any) -> None:
        total = self._builder.load(self._sums[place])
        self._builder.store(
            self._call("llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, total, inputs, weights), self._sums[place]
        )

    def add_bias(self, bias: Any) -> None:
        """bias: an address, 0 for none."""
        builder = self._builder
        with builder.if_then(builder.icmp_signed("!=", bias, _constant(0))):
            for column in range(_COLUMNS):
                added = builder.fpext(self._load(_BFLOATS, bias, column * 2 * _LANES), _FLOATS)
                for total in self._sums[column::_COLUMNS]:
                    builder.store(builder.fadd(builder.load(total), added), total)

    def store(self, out: Any, out_stride: Any) -> None:
        """Round and write. out: an address; out_stride: bytes."""
        builder = self._builder
        for place, total in enumerate(self._sums):
            row, column = divmod(place, _COLUMNS)
            address = builder.add(out, builder.mul(out_stride, _constant(row)))
            rounded = builder.bitcast(builder.fptrunc(builder.load(total), _BFLOATS), ir.VectorType(_I16, _LANES))
            builder.store(rounded, self._pointer(rounded.type, address, column * 2 * _LANES)).align = 2

    def _load(self, kind: Any, address: Any, offset: int) -> Any:
        loaded = self._builder.load(self._pointer(kind, address, offset))
        loaded.align = 2
        return loaded

    def _pointer(self, kind: Any, address: Any, offset: int) -> Any:
        return self._builder.inttoptr(self._builder.add(address, _constant(offset)), kind.as_pointer())

    def _prefetch(self, address: Any, offset: int) -> None:
        """Have a line brought to the second cache. It need not exist."""
        arguments = [ir.Constant(_I32, value) for value in (0, 2, 1)]
        self._call("llvm.prefetch.p0", ir.VoidType(), self._pointer(ir.IntType(8), address, offset), *arguments)

    def _spread(self, pair: Any) -> Any:
        undefined = ir.Constant(_LANES_I32, ir.Undefined)
        first = self._builder.insert_element(undefined, pair, ir.Constant(_I32, 0))
        all_lanes = self._builder.shuffle_vector(first, undefined, ir.Constant(_LANES_I32, [0] * _LANES))
        return self._builder.bitcast(all_lanes, _BFLOAT_PAIRS)

    def _call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self._builder.call(cgutils.get_or_insert_function(self._builder.module, kind, name), arguments)


def _constant(value: int) -> Any:
    return ir.Constant(_I64, value)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _multiply_tile(
    typing: Any, rows: Any, x: Any, x_stride: Any, weights: Any, num_inputs: Any, bias: Any, out: Any, out_stride: Any
) -> tuple[Any, Callable[..., Any]]:
    """Write the products of `rows` tokens, a literal, with a block of weights. Addresses, and strides in bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, x, x_stride, weights, num_inputs, bias, out, out_stride = arguments
        tile = _Tile(builder, rows.literal_value)
        tile.add_products(x, x_stride, weights, num_inputs)
        tile.add_bias(bias)
        tile.store(out, out_stride)
        return context.get_dummy_value()

    return types.void(rows, *[types.int64] * 7), generate


@compiled
def _multiply_block(x, x_stride, num_tokens, weights, num_inputs, bias, out, out_stride):  # type: ignore[no-untyped-def]
    """Multiply all tokens with one block of weights."""
    while num_tokens >= 12:
        _multiply_tile(12, x, x_stride, weights, num_inputs, bias, out, out_stride)
        x, out, num_tokens = x + 12 * x_stride, out + 12 * out_stride, num_tokens - 12
    if num_tokens >= 8:
        _multiply_tile(8, x, x_stride, weights, num_inputs, bias, out, out_stride)
        x, out, num_tokens = x + 8 * x_stride, out + 8 * out_stride, num_tokens - 8
    if num_tokens >= 4:
        _multiply_tile(4, x, x_stride, weights, num_inputs, bias, out, out_stride)
        x, out, num_tokens = x + 4 * x_stride, out + 4 * out_stride, num_tokens - 4
    if num_tokens >= 2:
        _multiply_tile(2, x, x_stride, weights, num_inputs, bias, out, out_stride)
        x, out, num_tokens = x + 2 * x_stride, out + 2 * out_stride, num_tokens - 2
    if num_tokens == 1:
        _multiply_tile(1, x, x_stride, weights, num_inputs, bias, out, out_stride)


@thread_kernel
def multiply(arguments):  # type: ignore[no-untyped-def]
    """Write x @ weights.T + bias: [num_tokens, num_outputs]. Addresses of contiguous arrays; bias: 0 for none.

    The unit of work is a block of weights with a chunk of the tokens.
    """
    _, x, num_tokens, weights, num_inputs, num_outputs, bias, out = integers(arguments, 8)
    num_chunks = -(-num_tokens // _CHUNK)
    num_units = num_outputs // WIDTH * num_chunks
    num_together = 1 + num_units // _PARTS
    begin = take(arguments, num_together)
    while begin < num_units:
        for unit in range(begin, min(begin + num_together, num_units)):
            block, first = unit // num_chunks, unit % num_chunks * _CHUNK
            _multiply_block(
                x + 2 * first * num_inputs,
                2 * num_inputs,
                min(_CHUNK, num_tokens - first),
                weights + block * 2 * WIDTH * num_inputs,
                num_inputs,
                bias + block * 2 * WIDTH if bias else 0,
                out + 2 * (first * num_outputs + block * WIDTH),
                2 * num_outputs,
            )
        begin = take(arguments, num_together)
