"""A whole engine around a loaded model, stepped on the test's own thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvern.engine.plan import ChoiceEnded, TokenLogprobs
from kvern.engine.request import GrammarState, Request, SamplingParams, StoppingParams
from kvern.engine.startup import Engine

GREEDY = SamplingParams(temperature=0)


@dataclass
class Outcome:
    """What one request got."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    ended: ChoiceEnded | None = None


class EngineHarness:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_steps = 0
        self._ids = count()
        self._outcomes: dict[int, Outcome] = {}

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        *,
        grammar: GrammarState | None = None,
        **fields: Any,
    ) -> Outcome:
        """End tokens count only where there is a grammar, or `stopping` says so. fields: further ones of Request."""
        number = next(self._ids)
        stopping = StoppingParams(max_tokens, ignore_eos=grammar is None)
        fields = {"stopping": stopping, "arrival": number, "grammar": grammar} | fields
        request = Request(number, list(prompt), len(prompt), sampling, **fields)
        self.engine.scheduler.add(request)
        self._outcomes[number] = Outcome(request)
        return self._outcomes[number]

    def step(self) -> None:
        plan = self.engine.scheduler.schedule()
        result = self.engine.scheduler.commit(plan, self.engine.runner.submit(plan).result())
        self.num_steps += 1
        for entry, (request_id, token_id) in enumerate(zip(result.request_ids, result.token_ids, strict=True)):
            self._outcomes[request_id].token_ids.append(token_id)
            self._outcomes[request_id].logprobs.append(result.logprobs.get(entry))
        for told in result.prompt_logprobs:
            known = self._outcomes[told.request_id].prompt_logprobs
            assert told.start == len(known) + 1, "told out of order, or twice"
            known.update(enumerate(told.items, start=told.start))
        for ended in result.ended:
            self._outcomes[ended.request_id].ended = ended

    def run(self) -> None:
        while self.engine.scheduler.has_work:
            self.step()
        self.engine.scheduler.check_integrity()
        assert self.engine.scheduler.pool.num_used == 0

    @property
    def num_preemptions(self) -> int:
        return sum(outcome.request.num_preemptions for outcome in self._outcomes.values())

    def generate(
        self, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams = GREEDY, **fields: Any
    ) -> Outcome:
        outcome = self.add(prompt, max_tokens, sampling, **fields)
        self.run()
        return outcome
