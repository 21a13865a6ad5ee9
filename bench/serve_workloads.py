"""What bench/serve.py sends: requests of random token ids, and when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from serve_targets import Answer, Request, Target

SPECIAL_TOKENS = 17
VOCAB_SIZE = 49152
"""Of SmolLM2. Prompts hold none of its special tokens, which come first."""


@dataclass(frozen=True)
class Answers:
    """What came of a workload."""

    streams: list[Answer]
    """Those that count for speed and gaps."""
    long: list[Answer] = field(default_factory=list)
    """Those of long prompts beside them."""


@dataclass(frozen=True)
class ClosedLoop:
    """Requests of which a fixed number runs at any time: as one ends, the next is sent."""

    concurrency: int
    num_requests: int
    own_tokens: int = 32
    """Of a prompt."""
    new_tokens: int = 128
    num_groups: int = 1
    shared_tokens: int = 0
    """With which all prompts of a group begin. Groups take turns."""

    def requests(self, rng: random.Random) -> list[Request]:
        groups = [token_ids(self.shared_tokens, rng) for _ in range(self.num_groups)]
        prompts = (groups[i % self.num_groups] + token_ids(self.own_tokens, rng) for i in range(self.num_requests))
        return [Request(prompt, self.new_tokens) for prompt in prompts]

    def warm_up(self, rng: random.Random) -> list[Request]:
        """Return requests of the same size that have nothing in common with the others."""
        return replace(self, num_requests=1).requests(rng)

    async def run(self, target: Target, requests: Sequence[Request]) -> Answers:
        waiting, answers = iter(requests), list[Answer]()

        async def client() -> None:
            for request in waiting:
                answers.append(await target.answer(request))

        await asyncio.gather(*(client() for _ in range(self.concurrency)))
        return Answers(answers)


@dataclass(frozen=True)
class Mixed:
    """Streams, all at once, and long prompts that arrive at a fixed interval beside them."""

    streams: ClosedLoop
    num_long: int
    long_tokens: int
    interval_s: float
    long_new_tokens: int = 8

    def requests(self, rng: random.Random) -> list[Request]:
        """Return those of the streams, then the long ones."""
        long = (Request(token_ids(self.long_tokens, rng), self.long_new_tokens) for _ in range(self.num_long))
        return [*self.streams.requests(rng), *long]

    def warm_up(self, rng: random.Random) -> list[Request]:
        return [*self.streams.warm_up(rng), *replace(self, num_long=1).requests(rng)[-1:]]

    async def run(self, target: Target, requests: Sequence[Request]) -> Answers:
        short, long = requests[: self.streams.num_requests], requests[self.streams.num_requests :]
        later = (self._arrive(target, request, turn) for turn, request in enumerate(long, start=1))
        answers, long_answers = await asyncio.gather(self.streams.run(target, short), asyncio.gather(*later))
        return Answers(answers.streams, long_answers)

    async def _arrive(self, target: Target, request: Request, turn: int) -> Answer:
        await asyncio.sleep(turn * self.interval_s)
        return await target.answer(request)


Workload = ClosedLoop | Mixed

WORKLOADS: dict[str, Workload] = {
    "c1": ClosedLoop(concurrency=1, num_requests=4),
    "c16": ClosedLoop(concurrency=16, num_requests=48),
    "c64": ClosedLoop(concurrency=64, num_requests=128),
    "prefix": ClosedLoop(
        concurrency=8, num_requests=64, own_tokens=48, new_tokens=32, num_groups=8, shared_tokens=1000
    ),
    "mixed": Mixed(
        ClosedLoop(concurrency=8, num_requests=8, new_tokens=256), num_long=3, long_tokens=4000, interval_s=2
    ),
}


def token_ids(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(SPECIAL_TOKENS, VOCAB_SIZE) for _ in range(count)]
