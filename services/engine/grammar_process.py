"""`python -m kvern.services.engine.grammar_process`: tries whether a constraint can be compiled.

The library bounds most of its work, not all: rules that refer to each other can keep it busy for hours, and a long
chain of them overflows its stack and ends the process. That process shall not be the engine. What passes here takes the
engine no longer, and no more of a stack: its threads have twice as much.
"""

from __future__ import annotations

from llguidance import LLTokenizer

from kvern.engine.constraint import Constraint, ConstraintKind
from kvern.engine.errors import RequestRefused
from kvern.engine.grammar import new_matcher
from kvern.services.engine.grammar_limits import LIMITS
from kvern.services.runtime.bounded_process import Message, serve

# The vocabulary makes no difference to what a grammar takes to be understood, and this one takes no room.
_BYTES = LLTokenizer("byte")


def answer(job: Message) -> Message:
    """Return why a constraint is refused, if it is. `job`: kind and text of a Constraint."""
    try:
        matcher = new_matcher(Constraint(ConstraintKind(job["kind"]), job["text"]), _BYTES)
    except RequestRefused as error:
        return {"field": error.field, "refused": str(error)}
    matcher.deep_copy().compute_bitmask()
    return {}


if __name__ == "__main__":
    serve(answer, LIMITS)
