"""Products with weights in groups of small integers, compiled by numba to a CPU's vector instructions.

The unit of work is a tile: 1, 2 or 4 tokens by 64 outputs, its sums in registers. A group's integers, exact in
bfloat16, are multiplied and added up first, in order; its scale follows, then its minimum by the sum of the group's
inputs. Every tile height does the same to a token in the same order, so a token's result does not depend on the batch.

Activations in bfloat16 are multiplied two inputs at a time (VDPBF16PS), where `HAS_BF16`. Those in float32 are
multiplied one at a time, on any CPU. Sums are in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from kvern.kernels.cpu import HAS_BF16, BFloat, compiled, has_feature, integers, take, thread_kernel
from kvern.kernels.linear.groups import GROUP

WIDTH = 64
"""Outputs of a tile."""

_LANES = 16
_COLUMNS = WIDTH // _LANES
_STEP = 8
"""Inputs that are multiplied before the next weights are loaded."""

_BYTES_A_STEP, _WORDS_A_STEP = WIDTH * _STEP, WIDTH * _STEP // 4
"""Of a block's weights: in 8 bits a byte each, in 4 bits a word of 16 for four."""

_HEIGHT = 4

_HAS_WORD_LOOKUP: bool = has_feature("avx512bw")
_HAS_BYTE_LOOKUP: bool = has_feature("avx512vbmi")

_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_FLOATS = ir.VectorType(_F32, _LANES)
_LANES_I32 = ir.VectorType(_I32, _LANES)
_PAIRS = ir.VectorType(_I16, 2 * _LANES)
"""Of each lane two inputs' weights."""
_BYTES = ir.VectorType(_I8, 4 * _LANES)


_BFLOATS = ir.VectorType(BFloat(), _LANES)
_BFLOAT_PAIRS = ir.VectorType(BFloat(), 2 * _LANES)


class _Tile(types.Type):  # type: ignore[misc]
    """[rows, WIDTH] float32 in registers."""

    def __init__(self, rows: int) -> None:
        super().__init__(f"Tile({rows})")
        self.rows = rows


@register_model(_Tile)
class _TileModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, tile: _Tile) -> None:
        super().__init__(manager, tile, ir.ArrayType(_FLOATS, tile.rows * _COLUMNS))


class _Emitter:
    """What the operations on tiles are made of."""

    def __init__(self, context: Any, builder: Any) -> None:
        self._context, self._builder = context, builder

    def pointer(self, array_type: Any, array: Any, index: Any, offset: int = 0) -> Any:
        data = self._context.make_array(array_type)(self._context, self._builder, array).data
        return self._builder.gep(data, [self.plus(index, offset)])

    def plus(self, index: Any, offset: int) -> Any:
        return self._builder.add(index, ir.Constant(index.type, offset)) if offset else index

    def load(self, kind: Any, pointer: Any) -> Any:
        loaded = self._builder.load(self._builder.bitcast(pointer, kind.as_pointer()))
        loaded.align = 1
        return loaded

    def store(self, value: Any, pointer: Any) -> None:
        self._builder.store(value, self._builder.bitcast(pointer, value.type.as_pointer())).align = 1

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self._builder.call(cgutils.get_or_insert_function(self._builder.module, kind, name), arguments)

    def spread(self, scalar: Any) -> Any:
        """Return a vector of 16 times the scalar."""
        undefined = ir.Constant(ir.VectorType(scalar.type, _LANES), ir.Undefined)
        first = self._builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        return self._builder.shuffle_vector(first, undefined, _same(_LANES_I32, 0))

    def multiply_add(self, a: Any, b: Any, total: Any) -> Any:
        return self.call("llvm.fma.v16f32", _FLOATS, a, b, total)

    def halves(self, pointer: Any) -> Any:
        """Return 16 numbers that are stored in float16."""
        return self._builder.fpext(self.load(ir.VectorType(ir.HalfType(), _LANES), pointer), _FLOATS)

    def nibbles(self, words: Any, place: int) -> Any:
        """Return the `place`th nibble of each of 32 words in bfloat16."""
        shifted = self._builder.lshr(words, _same(_PAIRS, 4 * place))
        if not _HAS_WORD_LOOKUP:
            return self._to_bfloat(self._builder.and_(shifted, _same(_PAIRS, 15)))
        # The index is a word's lowest five bits, of which the fifth is another nibble's.
        table = ir.Constant(_PAIRS, [_bfloat_bits(value % 16) for value in range(32)])
        return self.call("llvm.x86.avx512.permvar.hi.512", _PAIRS, table, shifted)

    def bytes(self, magnitudes: Any) -> tuple[Any, Any]:
        """Return 64 bytes, a sign and seven bits of magnitude each, in bfloat16: two vectors, eight in turn."""
        low, high = self._lookup(magnitudes, 0), self._lookup(magnitudes, 8)
        high = self._builder.or_(high, self._builder.and_(magnitudes, _same(_BYTES, 0x80)))
        return self._interleaved(low, high, 0), self._interleaved(low, high, 8)

    def _lookup(self, magnitudes: Any, shift: int) -> Any:
        """Return eight bits of what each byte's lowest seven are in bfloat16."""
        if not _HAS_BYTE_LOOKUP:
            integers = self._builder.zext(
                self._builder.and_(magnitudes, _same(_BYTES, 0x7F)), ir.VectorType(_I16, 4 * _LANES)
            )
            words = self._to_bfloat(integers)
            return self._builder.trunc(self._builder.lshr(words, _same(words.type, shift)), _BYTES)
        table = [_bfloat_bits(value) >> shift & 0xFF for value in range(128)]
        halves = (ir.Constant(_BYTES, table[:64]), ir.Constant(_BYTES, table[64:]))
        return self.call("llvm.x86.avx512.vpermi2var.qi.512", _BYTES, halves[0], magnitudes, halves[1])

    def _interleaved(self, low: Any, high: Any, first: int) -> Any:
        """Join bytes to words: of every sixteen the eight from `first` on."""
        places = [run + first + place for run in range(0, 64, 16) for place in range(8)]
        order = [index for place in places for index in (place, 64 + place)]
        mask = ir.Constant(ir.VectorType(_I32, len(order)), order)
        return self._builder.bitcast(self._builder.shuffle_vector(low, high, mask), _PAIRS)

    def _to_bfloat(self, words: Any) -> Any:
        """Return integers up to 255 in bfloat16."""
        floats = self._builder.uitofp(words, ir.VectorType(_F32, words.type.count))
        bits = self._builder.bitcast(floats, ir.VectorType(_I32, words.type.count))
        return self._builder.trunc(self._builder.lshr(bits, _same(bits.type, 16)), words.type)

    def dot(self, total: Any, array_type: Any, x: Any, weights: Any) -> Any:
        """Add the products of two inputs at pointer `x` with 16 outputs' weights."""
        if array_type.dtype == types.uint16:
            inputs = self._builder.bitcast(self.spread(self.load(_I32, x)), _BFLOAT_PAIRS)
            pairs = self._builder.bitcast(weights, _BFLOAT_PAIRS)
            return self.call("llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, total, inputs, pairs)
        lanes = self._builder.bitcast(weights, _LANES_I32)
        even = self._builder.shl(lanes, _same(_LANES_I32, 16))
        odd = self._builder.and_(lanes, _same(_LANES_I32, 0xFFFF0000))
        for place, bits in enumerate((even, odd)):
            value = self.load(_F32, self._builder.gep(x, [ir.Constant(_I32, place)]))
            total = self.multiply_add(self.spread(value), self._builder.bitcast(bits, _FLOATS), total)
        return total


def _same(vector: Any, value: int) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def _bfloat_bits(value: int) -> int:
    return int(np.float32(value).view(np.uint32)) >> 16


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _zeros(typing: Any, rows: Any) -> tuple[Any, Callable[..., Any]]:
    """Return a tile of zeros. rows: a literal."""
    tile = _Tile(rows.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(context.get_value_type(tile), [ir.Constant(_FLOATS, [0.0] * _LANES)] * _COLUMNS * tile.rows)

    return tile(rows), generate


@intrinsic  # type: ignore[untyped-decorator]
def _multiply(typing: Any, tile: Any, x: Any, at: Any, stride: Any, weights: Any, first: Any) -> Any:
    """Add the products of _STEP inputs, those from x[at] on, with the weights from weights[first] on.

    stride: from one token's inputs to the next one's.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = _Emitter(context, builder)
        total, x_array, x_at, x_stride, w_array, w_first = arguments
        rows = [x_at]
        while len(rows) < tile.rows:
            rows.append(builder.add(rows[-1], x_stride))
        load = _load_nibbles if weights.dtype == types.uint16 else _load_bytes
        loaded = load(emit, weights, w_array, w_first)
        for pair in range(_STEP // 2):
            vectors = [loaded(column, pair) for column in range(_COLUMNS)]
            for row, row_at in enumerate(rows):
                inputs = emit.pointer(x, x_array, row_at, 2 * pair)
                for column, vector in enumerate(vectors):
                    place = row * _COLUMNS + column
                    added = emit.dot(builder.extract_value(total, place), x, inputs, vector)
                    total = builder.insert_value(total, added, place)
        return total

    return tile(tile, x, at, stride, weights, first), generate


def _load_nibbles(emit: _Emitter, weights: Any, array: Any, first: Any) -> Callable[[int, int], Any]:
    words = [emit.load(_PAIRS, emit.pointer(weights, array, first, column * 2 * _LANES)) for column in range(_COLUMNS)]
    return lambda column, pair: emit.nibbles(words[column], pair)


def _load_bytes(emit: _Emitter, weights: Any, array: Any, first: Any) -> Callable[[int, int], Any]:
    vectors = [
        vector
        for offset in range(0, _STEP * WIDTH, _BYTES.count)
        for vector in emit.bytes(emit.load(_BYTES, emit.pointer(weights, array, first, offset)))
    ]
    return lambda column, pair: vectors[pair * _COLUMNS + column]


@intrinsic  # type: ignore[untyped-decorator]
def _add_scaled(typing: Any, tile: Any, group: Any, scales: Any, at: Any) -> Any:
    """Add a group's products times its scales, WIDTH of them in float16 from scales[at] on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = _Emitter(context, builder)
        total, products, array, first = arguments
        for column in range(_COLUMNS):
            factors = emit.halves(emit.pointer(scales, array, first, column * _LANES))
            for place in range(column, tile.rows * _COLUMNS, _COLUMNS):
                sums = emit.multiply_add(
                    builder.extract_value(products, place), factors, builder.extract_value(total, place)
                )
                total = builder.insert_value(total, sums, place)
        return total

    return tile(tile, group, scales, at), generate


@intrinsic  # type: ignore[untyped-decorator]
def _add_minima(typing: Any, tile: Any, sums: Any, at: Any, stride: Any, minima: Any, first: Any) -> Any:
    """Add each token's sum of a group's inputs, from sums[at] on, times the group's minima, in float16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = _Emitter(context, builder)
        total, sums_array, sums_at, sums_stride, array, minima_first = arguments
        factors = [
            emit.halves(emit.pointer(minima, array, minima_first, column * _LANES)) for column in range(_COLUMNS)
        ]
        for row in range(tile.rows):
            token = emit.spread(emit.load(_F32, emit.pointer(sums, sums_array, sums_at)))
            for column, factor in enumerate(factors):
                place = row * _COLUMNS + column
                added = emit.multiply_add(token, factor, builder.extract_value(total, place))
                total = builder.insert_value(total, added, place)
            sums_at = builder.add(sums_at, sums_stride)
        return total

    return tile(tile, sums, at, stride, minima, first), generate


@intrinsic  # type: ignore[untyped-decorator]
def _store(typing: Any, tile: Any, out: Any, at: Any, stride: Any) -> Any:
    """Write a tile to out[at] and on, in the type of out. stride: from one token's outputs to the next one's."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = _Emitter(context, builder)
        total, array, row_at, row_stride = arguments
        for row in range(tile.rows):
            for column in range(_COLUMNS):
                value = builder.extract_value(total, row * _COLUMNS + column)
                if out.dtype == types.uint16:
                    value = builder.bitcast(builder.fptrunc(value, _BFLOATS), ir.VectorType(_I16, _LANES))
                emit.store(value, emit.pointer(out, array, row_at, column * _LANES))
            row_at = builder.add(row_at, row_stride)
        return context.get_dummy_value()

    return types.void(tile, out, at, stride), generate


@intrinsic  # type: ignore[untyped-decorator]
def _sum_of_group(typing: Any, x: Any, at: Any) -> Any:
    """Return the sum of the GROUP inputs from x[at] on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = _Emitter(context, builder)
        array, first = arguments
        parts = []
        for part in range(GROUP // _LANES):
            pointer = emit.pointer(x, array, first, part * _LANES)
            if x.dtype == types.uint16:
                parts.append(builder.fpext(emit.load(_BFLOATS, pointer), _FLOATS))
            else:
                parts.append(emit.load(_FLOATS, pointer))
        return emit.call("llvm.vector.reduce.fadd.v16f32", _F32, ir.Constant(_F32, -0.0), builder.fadd(*parts))

    return types.float32(x, at), generate


@compiled
def _multiply_tile(rows, x, token, sums, weights, scales, minima, out, in_features, out_features, block):  # type: ignore[no-untyped-def]
    """Compute `rows` tokens, a literal, from `token` on, and the outputs of one block of WIDTH."""
    rows = numba.literally(rows)
    num_groups = in_features // GROUP
    step_size = len(weights) * _STEP // (in_features * out_features) * WIDTH
    step = block * (in_features // _STEP) * step_size
    total = _zeros(rows)
    for group in range(num_groups):
        products = _zeros(rows)
        for at in range(group * GROUP, (group + 1) * GROUP, _STEP):
            products = _multiply(products, x, token * in_features + at, in_features, weights, step)
            step += step_size
        column = (block * num_groups + group) * WIDTH
        total = _add_scaled(total, products, scales, column)
        if len(minima):
            total = _add_minima(total, sums, token * num_groups + group, num_groups, minima, column)
    _store(total, out, token * out_features + block * WIDTH, out_features)


@compiled
def _sums_of_groups(x):  # type: ignore[no-untyped-def]
    sums = np.empty(len(x) // GROUP, dtype=np.float32)
    for group in range(len(sums)):
        sums[group] = _sum_of_group(x, group * GROUP)
    return sums


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing: Any, address: Any, kind: Any) -> tuple[Any, Callable[..., Any]]:
    """Return a pointer to numbers of the type of `kind`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind)(address, kind), generate


@compiled
def _multiply_blocks(arguments, kind, word, num_words):  # type: ignore[no-untyped-def]
    """Write x @ weights.T: [num_tokens, out_features]. x: [num_tokens, in_features].

    arguments: addresses and sizes. x and out are in float32, or in bfloat16: `kind` is a number of the type, uint16 for
    that. `word` is one of the weights' type, of which _STEP inputs of a block take `num_words`. minima: 0 for none. The
    unit of work is a block of WIDTH outputs with all tokens.
    """
    _, x, num_tokens, weights, scales, minima, out, in_features, out_features = integers(arguments, 9)
    num_blocks, num_groups = out_features // WIDTH, in_features // GROUP
    x = numba.carray(_pointer(x, kind), num_tokens * in_features)
    out = numba.carray(_pointer(out, kind), num_tokens * out_features)
    weights = numba.carray(_pointer(weights, word), num_blocks * (in_features // _STEP) * num_words)
    scales = numba.carray(_pointer(scales, np.uint16(0)), out_features * num_groups)
    minima = numba.carray(_pointer(minima, np.uint16(0)), len(scales) if minima else 0)
    sums = _sums_of_groups(x) if len(minima) else np.empty(0, dtype=np.float32)
    block = take(arguments, 1)
    while block < num_blocks:
        token = 0
        while token + _HEIGHT <= num_tokens:
            _multiply_tile(_HEIGHT, x, token, sums, weights, scales, minima, out, in_features, out_features, block)
            token += _HEIGHT
        if token + 2 <= num_tokens:
            _multiply_tile(2, x, token, sums, weights, scales, minima, out, in_features, out_features, block)
            token += 2
        if token < num_tokens:
            _multiply_tile(1, x, token, sums, weights, scales, minima, out, in_features, out_features, block)
        block = take(arguments, 1)


def _multiply_8_float32(arguments):  # type: ignore[no-untyped-def]
    _multiply_blocks(arguments, np.float32(0), np.uint8(0), _BYTES_A_STEP)


def _multiply_4_float32(arguments):  # type: ignore[no-untyped-def]
    _multiply_blocks(arguments, np.float32(0), np.uint16(0), _WORDS_A_STEP)


def _multiply_8_bfloat16(arguments):  # type: ignore[no-untyped-def]
    _multiply_blocks(arguments, np.uint16(0), np.uint8(0), _BYTES_A_STEP)


def _multiply_4_bfloat16(arguments):  # type: ignore[no-untyped-def]
    _multiply_blocks(arguments, np.uint16(0), np.uint16(0), _WORDS_A_STEP)


_FUNCTIONS = {
    (8, torch.float32): _multiply_8_float32,
    (4, torch.float32): _multiply_4_float32,
    (8, torch.bfloat16): _multiply_8_bfloat16,
    (4, torch.bfloat16): _multiply_4_bfloat16,
}


def can_multiply(dtype: torch.dtype) -> bool:
    """Whether there are kernels for activations of a type."""
    return dtype is torch.float32 or (dtype is torch.bfloat16 and HAS_BF16)


@cache
def multiply(bits: int, dtype: torch.dtype) -> Any:
    """Return the kernel for weights in so many bits. Compiles it unless that was done before: seconds."""
    return thread_kernel(_FUNCTIONS[bits, dtype])
