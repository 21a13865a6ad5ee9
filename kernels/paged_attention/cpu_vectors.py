"""Vector code for a CPU, written in LLVM's language: what attention there is made of.

What becomes of a loop in numba is up to LLVM's vectorizer. Here 16 lanes are 16 lanes, what a loop carries stays in
registers, and a product and a sum are fused where they are written so and nowhere else. LLVM cuts vectors to what a
machine has.

Addresses are integers. An element's type is told by the numpy type that holds its bits: float32, float16, and uint16
for bfloat16. Two-byte elements come in pairs: a register of 16 pairs widens to the 16 even and the 16 odd ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from kvern.kernels.cpu import HAS_BF16, BFloat

LANES = 16

_I16, _I32, _F16 = ir.IntType(16), ir.IntType(32), ir.HalfType()
_INTS, _FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(ir.FloatType(), LANES)
_SHORTS, _HALVES = ir.VectorType(_I16, LANES), ir.VectorType(_F16, LANES)

_HIGH = 0xFFFF0000

_PAIRS = ir.VectorType(BFloat(), 2 * LANES)


class Vectors:
    """Writes instructions on vectors of 16 floats."""

    INT, FLOAT = ir.IntType(64), ir.FloatType()

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def number(self, value: int) -> Any:
        return ir.Constant(self.INT, value)

    def floats(self, value: float) -> Any:
        return ir.Constant(_FLOATS, [value] * LANES)

    def ints(self, value: int) -> Any:
        return ir.Constant(_INTS, [value] * LANES)

    def pointer(self, address: Any, kind: Any) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())

    def at(self, address: Any, index: Any, size: int = 4) -> Any:
        """Return the address of one of many elements of `size` bytes."""
        index = ir.Constant(self.INT, index) if isinstance(index, int) else index
        return self.builder.add(address, self.builder.mul(index, self.number(size)))

    def load(self, address: Any, kind: Any = _FLOATS, align: int = 4) -> Any:
        value = self.builder.load(self.pointer(address, kind))
        value.align = align
        return value

    def store(self, address: Any, value: Any) -> None:
        self.builder.store(value, self.pointer(address, value.type)).align = 4

    def prefetch(self, address: Any) -> None:
        """Have the line at an address, which need not exist, brought to the second cache: it waits for more lines."""
        reading, second_level, of_data = (ir.Constant(_I32, value) for value in (0, 2, 1))
        self.call(
            "llvm.prefetch.p0", ir.VoidType(), self.pointer(address, ir.IntType(8)), reading, second_level, of_data
        )

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, rounded once on machines that can."""
        return self.call("llvm.fmuladd.v16f32", _FLOATS, a, b, c)

    def splat(self, scalar: Any) -> Any:
        kind = ir.VectorType(scalar.type, LANES)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_I32, 0))
        return self.shuffle(one, one, [0] * LANES)

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))

    def first(self, vector: Any) -> Any:
        return self.builder.extract_element(vector, ir.Constant(_I32, 0))

    def larger(self, a: Any, b: Any) -> Any:
        """Return the larger in each lane: b where either is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def reduce(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Combine lanes with each other, by halves, to a scalar."""
        for step in (8, 4, 2, 1):
            vector = combine(vector, self.shuffle(vector, vector, [lane ^ step for lane in range(LANES)]))
        return self.first(vector)

    def exp(self, x: Any) -> Any:
        """Return exp(x): 0 below -87, exp(88) above 88, NaN for NaN.

        Source of range reduction and coefficients: expf of the Cephes library, https://netlib.org/cephes.
        """
        b = self.builder
        bounded = b.select(b.fcmp_ordered(">", x, self.floats(88.0)), self.floats(88.0), x)
        shift = self.floats(1.5 * 2.0**23)  # adding it rounds to an integer, which lies in the low bits then
        shifted = self.fma(bounded, self.floats(1.44269504), shift)
        n = b.fsub(shifted, shift)
        r = self.fma(n, self.floats(2.12194440e-4), self.fma(n, self.floats(-0.693359375), bounded))
        y = self.floats(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            y = self.fma(y, r, self.floats(c))
        y = b.fadd(self.fma(y, b.fmul(r, r), r), self.floats(1.0))
        exponent = b.shl(b.bitcast(shifted, _INTS), self.ints(23))
        power = b.bitcast(b.add(exponent, self.ints(127 << 23)), _FLOATS)
        return b.select(b.fcmp_ordered("<", x, self.floats(-87.0)), self.floats(0.0), b.fmul(y, power))

    @contextmanager
    def loop(self, start: Any, stop: Any, *initial: Any) -> Iterator[tuple[Any, list[Any]]]:
        """Write a loop from start to stop. Gives the count, and a list of values that each turn hands to the next.

        The body replaces the list's members; after the loop they are the last turn's.
        """
        b = self.builder
        start = ir.Constant(self.INT, start) if isinstance(start, int) else start
        before, head, body, after = b.block, *(b.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        phis = [b.phi(value.type) for value in (start, *initial)]
        b.cbranch(b.icmp_signed("<", phis[0], stop), body, after)
        b.position_at_end(body)
        values = phis[1:]
        yield phis[0], values
        following = [b.add(phis[0], self.number(1)), *values]
        for phi, at_first, later in zip(phis, (start, *initial), following, strict=True):
            phi.add_incoming(at_first, before)
            phi.add_incoming(later, b.block)
        b.branch(head)
        b.position_at_end(after)
        values[:] = phis[1:]


class Elements:
    """Reads and writes registers of one type of elements."""

    def __init__(self, vectors: Vectors, number_class: Any) -> None:
        self.vectors = vectors
        self._type = number_class.instance_type
        self.size: int = self._type.bitwidth // 8
        self.parts = 4 // self.size
        """Vectors of floats that a register widens to."""
        self.unit = LANES * self.parts
        """Elements in a register."""
        self._is_paired = self._type == types.uint16 and HAS_BF16
        self.per_factor = 2 if self._is_paired else 1
        """Elements in a lane of what `add_product` multiplies."""
        self.FACTORS = _INTS if self._is_paired else _FLOATS

    def count(self, elements: Any) -> Any:
        """Return how many registers hold some elements."""
        b, v = self.vectors.builder, self.vectors
        return b.sdiv(b.add(elements, v.number(self.unit - 1)), v.number(self.unit))

    def load(self, address: Any, count: Any = None) -> Any:
        """Read a register. Of one that is not whole, with a count of elements, no more are read; the others are 0."""
        if count is None:
            return self.vectors.load(address, _INTS, self.size)
        pointer, align = self.vectors.pointer(address, _INTS), ir.Constant(_I32, self.size)
        name = "llvm.masked.load.v16i32.p0"
        return self.vectors.call(name, _INTS, pointer, align, self._mask(count), self.vectors.ints(0))

    def store(self, address: Any, register: Any, count: Any = None) -> None:
        mask = self._mask(self.vectors.number(self.unit) if count is None else count)
        pointer, align = self.vectors.pointer(address, _INTS), ir.Constant(_I32, self.size)
        self.vectors.call("llvm.masked.store.v16i32.p0", ir.VoidType(), register, pointer, align, mask)

    def _mask(self, count: Any) -> Any:
        b = self.vectors.builder
        lanes = b.trunc(b.sdiv(count, self.vectors.number(self.parts)), _I32)
        return b.icmp_signed("<", ir.Constant(_INTS, list(range(LANES))), self.vectors.splat(lanes))

    def widen(self, register: Any) -> list[Any]:
        b, v = self.vectors.builder, self.vectors
        if self._type == types.float32:
            return [b.bitcast(register, _FLOATS)]
        if self._type == types.uint16:
            bits = b.shl(register, v.ints(16)), b.and_(register, v.ints(_HIGH))
            return [b.bitcast(each, _FLOATS) for each in bits]
        shorts = [b.trunc(each, _SHORTS) for each in (register, b.lshr(register, v.ints(16)))]
        return [b.fpext(b.bitcast(each, _HALVES), _FLOATS) for each in shorts]

    def factors(self, register: Any) -> list[Any]:
        """Return what `add_product` multiplies: the register as it is on a CPU that multiplies pairs, else widened."""
        return [register] if self._is_paired else self.widen(register)

    def add_product(self, total: Any, a: Any, b: Any) -> Any:
        """Return the total with the product of two factors added in each lane, of pairs the sum of both products."""
        if not self._is_paired:
            return self.vectors.fma(a, b, total)
        pairs = [self.vectors.builder.bitcast(factor, _PAIRS) for factor in (a, b)]
        return self.vectors.call("llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, total, *pairs)

    def narrow(self, parts: list[Any]) -> Any:
        """Round to nearest, ties to even."""
        b, v = self.vectors.builder, self.vectors
        if self._type == types.float32:
            return b.bitcast(parts[0], _INTS)
        if self._type == types.uint16:
            even, odd = map(self._rounded, parts)
            return b.or_(b.lshr(even, v.ints(16)), b.and_(odd, v.ints(_HIGH)))
        even, odd = (b.zext(b.bitcast(b.fptrunc(part, _HALVES), _SHORTS), _INTS) for part in parts)
        return b.or_(even, b.shl(odd, v.ints(16)))

    def _rounded(self, part: Any) -> Any:
        """Return bits whose upper halves are the nearest bfloat16."""
        b, v = self.vectors.builder, self.vectors
        bits = b.bitcast(part, _INTS)
        is_odd = b.and_(b.lshr(bits, v.ints(16)), v.ints(1))
        rounded = b.add(b.add(bits, v.ints(0x7FFF)), is_odd)
        return b.select(b.fcmp_unordered("uno", part, part), v.ints(0x7FC00000), rounded)


def transpose(v: Vectors, rows: list[Any]) -> list[Any]:
    """Return the columns of a matrix of 16 rows: in each of four rounds, pairs of rows exchange lanes."""
    for step in (8, 4, 2, 1):
        low = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
        high = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
        for row in range(LANES):
            if not row & step:
                a, b = rows[row], rows[row + step]
                rows[row], rows[row + step] = v.shuffle(a, b, low), v.shuffle(a, b, high)
    return rows
