"""Operations one after another on a CPU's threads, with nothing of Python between them.

It is to compiled kernels what a CUDA graph is to a GPU's: made once, then run with one call. All threads go through the
operations side by side, share out each of them, and wait for each other before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvern.kernels.cpu import Operation, compiled, integers, run, thread_kernel
from kvern.kernels.cpu_threads import address_of_num_threads, address_of_yield

_TURNS = 2000
"""For which a thread looks whether the others are done before it lets others have the core: some microseconds."""

_LINE = 8
"""Integers in a line of a cache: what threads write lies apart."""


class Program:
    """Operations, with symbols among their arguments."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        width = 1 + max(len(operation.arguments) for operation in operations)
        self._arguments = np.zeros((len(operations), -(-width // _LINE) * _LINE), np.int64)
        self._arrivals = np.zeros((len(operations), _LINE), np.int64)
        self._calls = np.empty((len(operations), 2), np.int64)
        self._kernels = [operation.kernel for operation in operations]  # held: all else are addresses
        places: dict[str, list[tuple[int, int]]] = {}
        for row, operation in enumerate(operations):
            self._calls[row] = operation.kernel.address, operation.at or self._arguments[row].ctypes.data
            for column, argument in enumerate(operation.arguments, start=1):
                if isinstance(argument, str):
                    places.setdefault(argument, []).append((row, column))
                else:
                    self._arguments[row, column] = argument
        self._places = {symbol: tuple(np.array(each).T) for symbol, each in places.items()}
        memory = self._calls.ctypes.data, len(operations), self._arrivals.ctypes.data
        self._all = Operation(_run_all, (*memory, address_of_num_threads(), address_of_yield()))

    def run(self, num_threads: int, symbols: Mapping[str, int]) -> None:
        """Run all operations, and wait for them. symbols: the value of each that there is."""
        self._arguments[:, 0] = 0
        self._arrivals[:, 0] = 0
        for symbol, places in self._places.items():
            self._arguments[places] = symbols[symbol]
        run(self._all, num_threads)


def _function_at(builder: Any, address: Any, result: Any, arguments: Sequence[Any]) -> Any:
    kind = ir.FunctionType(result, arguments)
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def _call(typing: Any, function: Any, argument: Any) -> tuple[Any, Callable[..., Any]]:
    """Call a kernel, given its address, with an address."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.call(_function_at(builder, values[0], ir.VoidType(), [values[1].type]), [values[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _ask(typing: Any, function: Any) -> tuple[Any, Callable[..., Any]]:
    """Call a function of C's that returns an int, given its address."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.call(_function_at(builder, values[0], ir.IntType(32), []), [])

    return types.int32(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _arrive(typing: Any, counter: Any) -> tuple[Any, Callable[..., Any]]:
    """Add one to the count at an address, once all that was written before can be seen."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "acq_rel")
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _count(typing: Any, counter: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the count at an address. What others wrote before they added to it can be seen."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], ir.IntType(64).as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@compiled
def _wait_for_all(counter, num_threads, give_way):  # type: ignore[no-untyped-def]
    _arrive(counter)
    num_turns = 0
    while _count(counter) < num_threads:
        num_turns += 1
        if num_turns > _TURNS:
            _ask(give_way)


@thread_kernel
def _run_all(arguments):  # type: ignore[no-untyped-def]
    _, calls, num_operations, arrivals, count_threads, give_way = integers(arguments, 6)
    num_threads = _ask(count_threads) if count_threads else 1
    functions = integers(calls, 2 * num_operations)
    for place in range(num_operations):
        _call(functions[2 * place], functions[2 * place + 1])
        if num_threads > 1:
            _wait_for_all(arrivals + place * 8 * _LINE, num_threads, give_way)
