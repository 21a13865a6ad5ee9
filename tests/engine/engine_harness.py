"""A whole engine around a loaded model, stepped on the test's own thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from kvern.engine.plan import ChoiceEnded
from kvern.engine.request import Request, SamplingParams, StoppingParams
from kvern.engine.startup import Engine

GREEDY = SamplingParams(temperature=0)


@dataclass
class Outcome:
    """What one request got."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    ended: ChoiceEnded | None = None


class EngineHarness:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_steps = 0
        self._ids = count()
        self._outcomes: dict[int, Outcome] = {}

    def add(self, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams = GREEDY) -> Outcome:
        number = next(self._ids)
        request = Request(
            number, list(prompt), len(prompt), sampling, StoppingParams(max_tokens, ignore_eos=True), arrival=number
        )
        self.engine.scheduler.add(request)
        self._outcomes[number] = Outcome(request)
        return self._outcomes[number]

    def step(self) -> None:
        plan = self.engine.scheduler.schedule()
        result = self.engine.scheduler.commit(plan, self.engine.runner.submit(plan).result())
        self.num_steps += 1
        for request_id, token_id in zip(result.request_ids, result.token_ids, strict=True):
            self._outcomes[request_id].token_ids.append(token_id)
        for ended in result.ended:
            self._outcomes[ended.request_id].ended = ended

    def run(self) -> None:
        while self.engine.scheduler.has_work:
            self.step()
        self.engine.scheduler.check_integrity()
        assert self.engine.scheduler.pool.num_used == 0

    def generate(self, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams = GREEDY) -> Outcome:
        outcome = self.add(prompt, max_tokens, sampling)
        self.run()
        return outcome
