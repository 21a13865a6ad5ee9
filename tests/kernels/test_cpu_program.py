"""Operations one after another on several threads."""

from __future__ import annotations

import numpy as np
import pytest

from kvern.kernels.cpu import Operation, integers, take, thread_kernel
from kvern.kernels.cpu_program import Program

NUM_OPERATIONS = 64


@thread_kernel
def _turn_and_add(arguments):  # type: ignore[no-untyped-def]
    """Write each element of x, from the last to the first, plus a number. Some parts take much longer than others."""
    _, x, out, size, added = integers(arguments, 5)
    place = take(arguments, 1)
    while place < size:
        for _ in range(place % 7 * place % 5 + 1):
            integers(out, size)[place] = integers(x, size)[size - 1 - place] + added
        place = take(arguments, 1)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_operation_sees_all_that_those_before_it_wrote(num_threads: int) -> None:
    x, y = np.arange(5000), np.zeros(5000, np.int64)
    ways = [(x.ctypes.data, y.ctypes.data), (y.ctypes.data, x.ctypes.data)]
    program = Program([Operation(_turn_and_add, (*ways[turn % 2], "size", turn)) for turn in range(NUM_OPERATIONS)])
    added = sum(range(NUM_OPERATIONS))
    for size in (5000, 1, 701):
        expected = np.concatenate((x[:size] + added, x[size:]))
        program.run(num_threads, {"size": size})
        assert np.array_equal(x, expected)


def test_symbol_is_told_in_each_place_and_at_each_run() -> None:
    x, y = np.arange(9), np.zeros(9, np.int64)
    there, back = (x.ctypes.data, y.ctypes.data), (y.ctypes.data, x.ctypes.data)
    program = Program([Operation(_turn_and_add, (*way, 9, "added")) for way in (there, back)])
    for added, total in ((3, 6), (10, 26)):
        program.run(2, {"added": added})
        assert np.array_equal(x, np.arange(9) + total)


def test_functions_that_kernels_call_have_no_files_of_their_own() -> None:
    """Two processes that wrote these at once would leave what was compiled for one type under another."""
    assert integers.stats.cache_path is None
