"""`python -m kvern.services.engine.grammar_process`: tries whether a constraint can be compiled.

The library bounds most of its work, not all: rules that refer to each other can keep it busy for hours, and a long
chain of them overflows its stack and ends the process. That process shall not be the engine. What passes here takes the
engine no longer, and no more of a stack: its threads have twice as much.
"""

from __future__ import annotations

import json
import sys
from functools import cache

from llguidance import LLTokenizer
from tokenizers.pre_tokenizers import ByteLevel

from kvern.engine.constraint import Constraint, ConstraintKind
from kvern.engine.errors import RequestRefused
from kvern.engine.grammar import new_matcher
from kvern.services.engine.grammar_limits import LIMITS
from kvern.services.runtime.bounded_process import Message, serve

_BYTES = {symbol: number for number, symbol in enumerate(ByteLevel.alphabet())}


@cache
def tokenizer() -> LLTokenizer:
    """Return one that knows the names and the number of the model's tokens, which grammars may speak of.

    Otherwise the vocabulary makes no difference to what a grammar takes to be understood, so it is bytes, which take no
    room. Standard input holds the model's `added_tokens`, as its tokenizer.json has them, and its `vocab_size`.
    """
    setup = json.load(sys.stdin.buffer)
    added = [{**token, "id": number} for number, token in enumerate(setup["added_tokens"], start=len(_BYTES))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    description = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": _BYTES, "merges": []},
    }
    num_tokens = max(setup["vocab_size"], len(_BYTES) + len(added))
    return LLTokenizer(json.dumps(description), n_vocab=num_tokens, eos_token=[0])


def answer(job: Message) -> Message:
    """Return why a constraint is refused, if it is. `job`: kind and text of a Constraint."""
    try:
        matcher = new_matcher(Constraint(ConstraintKind(job["kind"]), job["text"]), tokenizer())
    except RequestRefused as error:
        return {"field": error.field, "refused": str(error)}
    matcher.deep_copy().compute_bitmask()
    return {}


if __name__ == "__main__":
    tokenizer()  # once, for all that are forked
    serve(answer, LIMITS)
