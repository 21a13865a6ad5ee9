"""What grammars allow in one step's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvern.engine.device_copy import PinnedRing
from kvern.engine.logits_processors import TokenBitmask
from kvern.engine.request import GrammarState, Request
from kvern.engine.tensor_parallel.shard import WHOLE, Shard

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class GrammarRows:
    """The sampled rows that grammars have a say in."""

    rows: list[int]
    states: list[GrammarState]
    may_end: list[bool]
    shard: Shard

    def bitmask(self, vocab_size: int, ring: PinnedRing) -> TokenBitmask:
        """Return what they allow, as an edit."""
        return TokenBitmask(ring.to_device(self.rows), ring.to_device(self.bits(vocab_size), torch.int32))

    def bits(self, vocab_size: int) -> NDArray[np.int32]:
        """Ask the grammars, as far as they have come by now: [num_rows, ceil(vocab_size / 32)].

        Of the ranks that share a model, rank 0 alone has them.
        """
        import numpy as np  # only grammars need it

        bits = np.zeros((len(self.rows), -(-vocab_size // 32)), dtype=np.int32)
        for row, state, may_end in zip(bits, self.states, self.may_end, strict=True):
            state.fill(row, may_end=may_end)
        self.shard.broadcast(torch.from_numpy(bits))
        return bits


def find_grammar_rows(requests: Sequence[Request], shard: Shard = WHOLE) -> GrammarRows | None:
    """Return which of a step's sampled rows, given whose they are, have a grammar. None: none has."""
    found = [(row, request, request.grammar) for row, request in enumerate(requests) if request.grammar is not None]
    if not found:
        return None
    return GrammarRows(
        rows=[row for row, _, _ in found],
        states=[state for _, _, state in found],
        may_end=[not request.stopping.ignore_eos for _, request, _ in found],
        shard=shard,
    )
