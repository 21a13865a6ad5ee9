"""Whether constraints can be compiled in bounds, seen in processes that may be lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial

from kvern.services.engine.grammar_limits import LIMITS, QUICK_S
from kvern.services.runtime.bounded_process import Message
from kvern.services.runtime.bounded_work import BoundedWork


class GrammarTrials:
    """Two lines of constraints. Each is tried for QUICK_S, which nearly all have enough of; the few others go into the
    second line and wait for each other, for as long as LIMITS allow. So who sends such hardly holds up anybody else.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int) -> None:
        """tokenizer_json, vocab_size: as of GrammarCompiler."""
        setup = {"added_tokens": json.loads(tokenizer_json)["added_tokens"], "vocab_size": vocab_size}
        self.work = BoundedWork("kvern.services.engine.grammar_process", json.dumps(setup).encode())
        self._lines = ((asyncio.Lock(), QUICK_S), (asyncio.Lock(), LIMITS.cpu_s))

    async def run(self, job: Message, is_known: Callable[[], bool]) -> Message | None:
        """Return the answer to a job; None where it takes too much.

        is_known: whether it need not be tried any more, because others asked for the same. The answer is then an empty
        one. Raises Unavailable, OSError where nobody can try it.
        """
        for line, cpu_s in self._lines:
            if (answer := await self._run_in(line, cpu_s, job, is_known)) is not None:
                return answer
        return None

    async def _run_in(
        self, line: asyncio.Lock, cpu_s: float, job: Message, is_known: Callable[[], bool]
    ) -> Message | None:
        await line.acquire()
        if is_known():
            line.release()
            return {}
        trial = asyncio.get_running_loop().run_in_executor(None, partial(self.work.ask, job, cpu_s=cpu_s))
        answered = asyncio.shield(trial)
        # The line is the trial's, which goes on where its request is aborted. Added after the request's own callback,
        # so that who comes next finds the constraint known.
        trial.add_done_callback(lambda _: line.release())
        return await answered
