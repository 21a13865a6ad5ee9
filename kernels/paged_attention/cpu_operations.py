"""What attention on a CPU does with vectors, as functions for numba. Of addresses and elements tells `cpu_vectors`.

Everything is added up in an order that depends on positions and dimensions alone: how many rows or keys are worked on
together changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kvern.kernels.paged_attention.cpu_vectors import LANES, Elements, Vectors, transpose

SPLIT = 256
"""Positions attended before the softmax is brought up to date. Scores and weights are [rows, SPLIT]."""

MAX_ROWS = 6
"""Queries attended together: with four vectors of keys or values, all sums stay in 32 registers."""

_PANEL = 4
"""Vectors of sums for each row."""

_VECTOR, _ROW = LANES * 4, SPLIT * 4
"""Bytes."""

_INT, _FLOAT = types.int64, types.float32


def _instructions(write: Callable[..., Any], *kinds: Any, result: Any) -> Any:
    """Return what an intrinsic does: what `write` writes, given `Vectors` and the arguments."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return write(Vectors(builder), *arguments)

    return result(*kinds), generate


def _operation(write: Callable[..., None], *kinds: Any) -> Any:
    """Return what an intrinsic does: to call a function, so that its loops have all registers to themselves.

    `write` writes it, given `Vectors` and the arguments: `Elements` for one that is a type.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        is_type = [isinstance(kind, types.NumberClass) for kind in kinds]
        name = f"{write.__qualname__}.{'.'.join(map(str, kinds))}"
        if name not in builder.module.globals:
            values = [value.type for value, it in zip(arguments, is_type, strict=True) if not it]
            function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), values), name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            inner = ir.IRBuilder(function.append_basic_block())
            v, rest = Vectors(inner), iter(function.args)
            write(v, *[Elements(v, kind) if it else next(rest) for kind, it in zip(kinds, is_type, strict=True)])
            inner.ret_void()
        given = [value for value, it in zip(arguments, is_type, strict=True) if not it]
        builder.call(builder.module.globals[name], given)
        return context.get_dummy_value()

    return types.void(*kinds), generate


@intrinsic
def address_of(typing_context, address):  # type: ignore[no-untyped-def]
    """Return an address as a pointer, for `numba.carray`."""

    def write(v: Vectors, address: Any) -> Any:
        return v.pointer(address, ir.IntType(8))

    return _instructions(write, _INT, result=types.voidptr)


@intrinsic
def add_atomically(typing_context, address, amount):  # type: ignore[no-untyped-def]
    """Add to an int64 that other threads add to, too. Returns what it was. Whoever adds later sees what was written."""

    def write(v: Vectors, address: Any, amount: Any) -> Any:
        return v.builder.atomic_rmw("add", v.pointer(address, ir.IntType(64)), amount, "acq_rel")

    return _instructions(write, _INT, _INT, result=_INT)


@intrinsic
def copy(typing_context, destination, source, num_bytes):  # type: ignore[no-untyped-def]
    def write(v: Vectors, destination: Any, source: Any, num_bytes: Any) -> None:
        pointers = [v.pointer(each, ir.IntType(8)) for each in (destination, source)]
        v.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), *pointers, num_bytes, ir.Constant(ir.IntType(1), 0))

    return _operation(write, _INT, _INT, _INT)


def _registers(e: Elements, head_dim: Any) -> Iterator[tuple[Any, Any]]:
    """Write loops over the registers of a row: whole ones, then the rest of it.

    Yields the number of elements before the register, and how many it has, None where it is whole.
    """
    v, b = e.vectors, e.vectors.builder
    unit = v.number(e.unit)
    whole = b.sdiv(head_dim, unit)
    with v.loop(0, whole) as (index, _):
        yield b.mul(index, unit), None
    with v.loop(whole, e.count(head_dim)) as (index, _):
        begun = b.mul(index, unit)
        yield begun, b.sub(head_dim, begun)


@intrinsic
def load_query(typing_context, element, query, row, head_dim):  # type: ignore[no-untyped-def]
    """Write a row of elements as `score` reads it: as floats in their order, or pairs of bfloat16."""

    def write(v: Vectors, e: Elements, query: Any, row: Any, head_dim: Any) -> None:
        for begun, count in _registers(e, head_dim):
            parts = e.factors(e.load(v.at(row, begun, e.size), count))
            if len(parts) == 2:
                even, odd = parts
                lanes = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
                parts = [v.shuffle(even, odd, lanes[:LANES]), v.shuffle(even, odd, lanes[LANES:])]
            first = v.at(query, v.builder.sdiv(begun, v.number(e.per_factor)))
            for index, part in enumerate(parts):
                v.store(v.at(first, index, _VECTOR), part)

    return _operation(write, element, _INT, _INT, _INT)


@intrinsic
def pack_keys(typing_context, element, packed, rows, ahead, head_dim):  # type: ignore[no-untyped-def]
    """Write 16 keys as `score` reads them: [head_dim, 16] floats, or pairs of bfloat16.

    rows: the addresses of the keys; ahead: as many of rows to fetch meanwhile.
    """

    def write(v: Vectors, e: Elements, packed: Any, rows: Any, ahead: Any, head_dim: Any) -> None:
        for begun, count in _registers(e, head_dim):
            keys, later = (
                [v.at(v.load(v.at(each, lane, 8), v.INT), begun, e.size) for lane in range(LANES)]
                for each in (rows, ahead)
            )
            registers = [e.load(key, count) for key in keys]
            for row in later:
                v.prefetch(row)
            first = v.at(packed, v.builder.sdiv(begun, v.number(e.per_factor)), _VECTOR)
            parts = [part for column in transpose(v, registers) for part in e.factors(column)]
            for index, part in enumerate(parts):
                v.store(v.at(first, index, _VECTOR), part)

    return _operation(write, element, _INT, _INT, _INT, _INT)


@intrinsic
def fetch(typing_context, rows, num_rows, row_size):  # type: ignore[no-untyped-def]
    """Have rows of so many bytes brought near. rows: their addresses."""

    def write(v: Vectors, rows: Any, num_rows: Any, row_size: Any) -> None:
        with v.loop(0, num_rows) as (index, _):
            row = v.load(v.at(rows, index, 8), v.INT)
            with v.loop(0, v.builder.sdiv(row_size, v.number(64))) as (line, _):
                v.prefetch(v.at(row, line, 64))

    return _operation(write, _INT, _INT, _INT)


@intrinsic
def score(  # type: ignore[no-untyped-def]
    typing_context, element, scores, num_rows, queries, packed, ahead, num_groups, head_dim, depth
):
    """Multiply up to 6 queries, [num_rows, depth], with groups of 16 packed keys, [num_groups, depth, 16].

    Each score is the sum over dimensions in their order. ahead: addresses of as many rows to fetch meanwhile.
    """

    def write(
        v: Vectors, e: Elements, scores: Any, num_rows: Any, queries: Any, packed: Any, ahead: Any, groups: Any,
        head_dim: Any, depth: Any,
    ) -> None:  # fmt: skip
        b = v.builder
        panels, dims = b.sdiv(groups, v.number(_PANEL)), (b.sdiv(head_dim, v.number(e.per_factor)), depth)
        for rows in range(1, MAX_ROWS + 1):
            with b.if_then(b.icmp_signed("==", num_rows, v.number(rows))):
                with v.loop(0, panels) as (panel, _):
                    group = b.mul(panel, v.number(_PANEL))
                    _score_groups(v, e, (rows, _PANEL), scores, queries, packed, ahead, group, *dims)
                with v.loop(b.mul(panels, v.number(_PANEL)), groups) as (group, _):
                    _score_groups(v, e, (rows, 1), scores, queries, packed, ahead, group, *dims)

    return _operation(write, element, *[_INT] * 8)


def _score_groups(
    v: Vectors, e: Elements, shape: tuple[int, int], scores: Any, queries: Any, packed: Any, ahead: Any, group: Any,
    num_factors: Any, depth: Any,
) -> None:  # fmt: skip
    """shape: how many rows, and groups of keys."""
    b, (rows, groups) = v.builder, shape
    group_size, later = b.mul(depth, v.number(LANES)), v.at(ahead, group, 8 * LANES)
    firsts = [v.at(packed, b.mul(b.add(group, v.number(each)), group_size)) for each in range(groups)]
    with v.loop(0, num_factors, *[v.floats(0.0)] * (rows * groups)) as (index, sums):
        keys = [v.load(v.at(first, index, _VECTOR), e.FACTORS) for first in firsts]
        line, row = b.sdiv(index, v.number(LANES * groups)), b.srem(index, v.number(LANES * groups))
        v.prefetch(v.at(v.load(v.at(later, row, 8), v.INT), line, 64))
        for row in range(rows):
            query = v.splat(v.load(v.at(v.at(queries, b.mul(depth, v.number(row))), index), e.FACTORS.element))
            for each, key in enumerate(keys, row * groups):
                sums[each] = e.add_product(sums[each], query, key)
    for index, value in enumerate(sums):
        row, each = divmod(index, groups)
        v.store(v.at(v.at(scores, row, _ROW), b.add(group, v.number(each)), _VECTOR), value)


@intrinsic
def cap(typing_context, scores, num_groups, scale, softcap):  # type: ignore[no-untyped-def]
    """Turn groups of 16 scores into softcap * tanh(score * scale / softcap)."""

    def write(v: Vectors, scores: Any, num_groups: Any, scale: Any, softcap: Any) -> None:
        b, one, two = v.builder, v.floats(1.0), v.floats(2.0)
        factor, limit = v.splat(scale), v.splat(softcap)
        with v.loop(0, num_groups) as (group, _):
            at = v.at(scores, group, _VECTOR)
            power = v.exp(b.fmul(b.fdiv(b.fmul(v.load(at), factor), limit), two))
            v.store(at, b.fmul(limit, b.fsub(one, b.fdiv(two, b.fadd(power, one)))))

    return _operation(write, _INT, _INT, _FLOAT, _FLOAT)


@intrinsic
def weigh(typing_context, scores, num_groups, scale, state):  # type: ignore[no-untyped-def]
    """Turn groups of 16 scores of one query, scaled, into exp(score - maximum).

    state: [2], gets the maximum and the sum of the weights, which are added by lane, then lanes by halves.
    """

    def write(v: Vectors, scores: Any, num_groups: Any, scale: Any, state: Any) -> None:
        b, factor = v.builder, v.splat(scale)
        with v.loop(0, num_groups, v.floats(float("-inf"))) as (group, maxima):
            maxima[0] = v.larger(b.fmul(v.load(v.at(scores, group, _VECTOR)), factor), maxima[0])
        maximum = v.reduce(maxima[0], v.larger)
        with v.loop(0, num_groups, v.floats(0.0)) as (group, sums):
            at = v.at(scores, group, _VECTOR)
            weights = v.exp(b.fsub(b.fmul(v.load(at), factor), v.splat(maximum)))
            v.store(at, weights)
            sums[0] = b.fadd(sums[0], weights)
        v.store(state, maximum)
        v.store(v.at(state, 1), v.reduce(sums[0], b.fadd))

    return _operation(write, _INT, _INT, _FLOAT, _INT)


@intrinsic
def add_values(  # type: ignore[no-untyped-def]
    typing_context, element, sums, num_rows, weights, rows, ahead, start, stop, head_dim, depth
):
    """Add values, each times its weight, to the sums of up to 6 queries, in the order of the values.

    sums: [num_rows, depth] floats; of two-byte elements the even ones of a register come before the odd ones.
    weights: [num_rows, SPLIT]; rows: [SPLIT], the addresses of values, of which those in [start, stop) are added;
    ahead: [SPLIT], addresses of rows to fetch meanwhile.
    """

    def write(v: Vectors, e: Elements, sums: Any, num_rows: Any, *arguments: Any) -> None:
        b, head_dim, together = v.builder, arguments[-2], _PANEL // e.parts
        panels = b.sdiv(head_dim, v.number(together * e.unit))
        for rows in range(1, MAX_ROWS + 1):
            with b.if_then(b.icmp_signed("==", num_rows, v.number(rows))):
                with v.loop(0, panels) as (panel, _):
                    begun = b.mul(panel, v.number(together * e.unit))
                    _add_panel(v, e, (rows, together), begun, None, sums, *arguments)
                with v.loop(b.mul(panels, v.number(together)), e.count(head_dim)) as (register, _):
                    begun = b.mul(register, v.number(e.unit))
                    _add_panel(v, e, (rows, 1), begun, b.sub(head_dim, begun), sums, *arguments)

    return _operation(write, element, *[_INT] * 9)


def _add_panel(
    v: Vectors, e: Elements, shape: tuple[int, int], begun: Any, count: Any, sums: Any, weights: Any, rows: Any,
    ahead: Any, start: Any, stop: Any, head_dim: Any, depth: Any,
) -> None:  # fmt: skip
    """shape: how many rows, and registers of a value, from the element `begun` on, of which there are `count`."""
    num_rows, together = shape
    firsts = [v.at(sums, v.builder.add(v.builder.mul(depth, v.number(row)), begun)) for row in range(num_rows)]
    places = [v.at(first, part, _VECTOR) for first in firsts for part in range(together * e.parts)]
    with v.loop(start, stop, *map(v.load, places)) as (position, totals):
        value, later = (v.at(v.load(v.at(each, position, 8), v.INT), begun, e.size) for each in (rows, ahead))
        registers = [e.load(v.at(value, each, _VECTOR), count) for each in range(together)]
        for each in range(together):
            v.prefetch(v.at(later, each, _VECTOR))
        parts = [part for register in registers for part in e.widen(register)]
        for row in range(num_rows):
            weight = v.splat(v.load(v.at(v.at(weights, position), row, _ROW), v.FLOAT))
            for each, part in enumerate(parts, row * len(parts)):
                totals[each] = v.fma(weight, part, totals[each])
    for place, total in zip(places, totals, strict=True):
        v.store(place, total)


@intrinsic
def merge(typing_context, total, state, sums, sums_state, depth):  # type: ignore[no-untyped-def]
    """Add to what a query attended in earlier splits, [depth], what it attended in one more. States as in `weigh`."""

    def write(v: Vectors, total: Any, state: Any, sums: Any, sums_state: Any, depth: Any) -> None:
        b = v.builder
        old, new = (v.splat(v.load(each, v.FLOAT)) for each in (state, sums_state))
        maximum = v.larger(old, new)
        kept, gained = v.exp(b.fsub(old, maximum)), v.exp(b.fsub(new, maximum))

        def add(earlier: Any, later: Any) -> Any:
            return v.fma(earlier, kept, b.fmul(later, gained))

        weights = [v.splat(v.load(v.at(each, 1), v.FLOAT)) for each in (state, sums_state)]
        v.store(state, v.first(maximum))
        v.store(v.at(state, 1), v.first(add(*weights)))
        with v.loop(0, b.sdiv(depth, v.number(LANES))) as (index, _):
            at = v.at(total, index, _VECTOR)
            v.store(at, add(v.load(at), v.load(v.at(sums, index, _VECTOR))))

    return _operation(write, *[_INT] * 5)


@intrinsic
def write_row(typing_context, element, row, total, state, head_dim):  # type: ignore[no-untyped-def]
    """Write what a query attended, divided by the sum of its weights, as elements. State as in `weigh`."""

    def write(v: Vectors, e: Elements, row: Any, total: Any, state: Any, head_dim: Any) -> None:
        weight = v.splat(v.load(v.at(state, 1), v.FLOAT))
        for begun, count in _registers(e, head_dim):
            parts = [v.load(v.at(v.at(total, begun), part, _VECTOR)) for part in range(e.parts)]
            register = e.narrow([v.builder.fdiv(part, weight) for part in parts])
            e.store(v.at(row, begun, e.size), register, count)

    return _operation(write, element, _INT, _INT, _INT, _INT)
