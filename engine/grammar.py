"""Grammars that outputs must match: compiled off the engine thread, then one state a choice, which allows tokens.

llguidance does the work: see docs/decisions/0006-grammar-library.md.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from kvern.engine.constraint import Constraint, to_lark
from kvern.engine.errors import RequestRefused

_MAX_ERROR_CHARS = 500
_QUOTED_LINE = re.compile(r"\n *\d+ \| ")
_LIMITS = LLParserLimits(verbose_errors=False)
"""The library's own: they bound most of the work of compiling, and that of each step to some 20 ms."""

_STACK_BYTES = 8 * 2**20
"""Of the thread that compiles: it recurses as deep as rules refer to each other. The system's own may be 2 MiB."""


class Grammar:
    """A compiled constraint. Threads may share it."""

    def __init__(self, matcher: LLMatcher, end_bits: NDArray[np.int32]) -> None:
        """end_bits: the end tokens, as a row that `GrammarState.fill` writes."""
        self._matcher = matcher
        self._end_bits = end_bits

    def start(self) -> MatcherState:
        """Return a state at the beginning of an output."""
        return MatcherState(self._matcher.deep_copy(), self._end_bits)


class MatcherState:
    """Where one output stands in its grammar. Implements `GrammarState`."""

    def __init__(self, matcher: LLMatcher, end_bits: NDArray[np.int32]) -> None:
        self._matcher = matcher
        self._end_bits = end_bits

    @property
    def error(self) -> str:
        return _error_of(self._matcher)

    def advance(self, token_id: int) -> bool:
        # One that has failed takes end tokens all the same.
        return self._matcher.consume_token(token_id) and not self._matcher.is_error()

    def fill(self, row: NDArray[np.int32], *, may_end: bool) -> None:
        # Where the library gives up, it allows the end tokens alone, and `advance` then fails.
        row[:] = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[: len(row)]
        if not may_end and (others := row & ~self._end_bits).any():
            row[:] = others


class GrammarCompiler:
    """Compiles constraints on a thread of its own, and remembers the last ones. One other thread calls it."""

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        max_entries: int = 256,
    ) -> None:
        """tokenizer_json: what a Hugging Face tokenizer.json holds. vocab_size: the model's, which may exceed it.

        Takes a second or so with a large vocabulary. Raises ValueError for a tokenizer that the library cannot read.
        """
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        self._end_bits = _bits(eos_token_ids, vocab_size)
        self._pool = _one_thread(_STACK_BYTES)
        self._max_entries = max_entries
        self._grammars: OrderedDict[Constraint, Future[Grammar]] = OrderedDict()

    def compile(self, constraint: Constraint) -> Future[Grammar]:
        """Return the constraint's grammar when it is there, or RequestRefused naming the client's field.

        The future may be others' too: do not cancel it.
        """
        future = self._grammars.get(constraint)
        if future is None:
            future = self._grammars[constraint] = self._pool.submit(self._compile, constraint)
            if len(self._grammars) > self._max_entries:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(constraint)
        return future

    def knows(self, constraint: Constraint) -> bool:
        """Whether it was asked for this one not long ago."""
        return constraint in self._grammars

    def close(self) -> None:
        """Compile nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, constraint: Constraint) -> Grammar:
        return Grammar(new_matcher(constraint, self._tokenizer), self._end_bits)


def new_matcher(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a constraint. Raises RequestRefused naming the client's field."""
    try:
        grammar = to_lark(constraint, tokenizer)
    except ValueError as error:
        raise RequestRefused(constraint.field, f"cannot be compiled: {error}") from error
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise RequestRefused(constraint.field, f"cannot be compiled: {_error_of(matcher)}")
    return matcher


def _one_thread(stack_bytes: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
    before = threading.stack_size(stack_bytes)
    pool.submit(int)  # starts the thread
    threading.stack_size(before)
    return pool


def _bits(token_ids: Collection[int], vocab_size: int) -> NDArray[np.int32]:
    flags = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
    flags[list(token_ids)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


def _error_of(matcher: LLMatcher) -> str:
    """Return what is wrong, without the grammar that the library quotes after it: a client may have written another."""
    return (
        _QUOTED_LINE.split(matcher.get_error(), maxsplit=1)[0].replace("<non-verbose/>", "").strip()[:_MAX_ERROR_CHARS]
    )
