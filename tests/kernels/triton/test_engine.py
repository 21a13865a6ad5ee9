"""The whole engine on interpreted kernels: the tokens of a tiny model are those of the CPU's own path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from kvern.engine.config import EngineConfig
from kvern.engine.core import Add, EngineCore, Output, Stop
from kvern.engine.cuda_graphs import Program
from kvern.engine.device_copy import PinnedRing
from kvern.engine.gpu_memory import run_under_grammar
from kvern.engine.logits_processors import TokenBitmask
from kvern.engine.model.loader import LoadedModel
from kvern.engine.model.ops import FusedOps
from kvern.engine.plan import Plan, StepResult, Submission
from kvern.engine.request import Request, SamplingParams, StoppingParams
from kvern.engine.runner import ModelRunner
from kvern.engine.startup import Engine, build_engine
from kvern.kernels.block_copy import copy_blocks
from tests.engine import tiny_models
from tests.engine.test_no_host_reads import HostReadsForbidden
from tests.engine.tiny_llama import PROMPT, load, save_tiny

MAX_SEQS, MAX_TOKENS = 5, 40

SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(1.0, top_p=0.9, top_k=20, min_p=0.01, seed=1, logprobs=2),
    SamplingParams(0.8, seed=2, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={5: 2.0}),
]


class AllowOdd:
    """Implements `GrammarState`: odd tokens only."""

    error = ""

    def advance(self, token_id: int) -> bool:
        return token_id % 2 == 1

    def fill(self, row: np.ndarray[Any, np.dtype[np.int32]], *, may_end: bool) -> None:
        row[:] = np.int32(-0x55555556)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("llama")
    save_tiny(path, num_hidden_layers=1)
    return load(path)


def forbid_host_reads(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Have launching a step fail where it reads from the device. Returns where to find the steps."""
    submit = engine.runner.submit
    steps: list[Plan] = []

    def guarded(plan: Plan) -> Submission:
        steps.append(plan)
        with HostReadsForbidden():
            return submit(plan)

    monkeypatch.setattr(engine.runner, "submit", guarded)
    return steps


def count_turns(monkeypatch: pytest.MonkeyPatch) -> list[PinnedRing]:
    """Return where rings are told of that go on in their next buffer."""
    turned: list[PinnedRing] = []
    turn = PinnedRing.turn

    def recorded(ring: PinnedRing) -> None:
        turned.append(ring)
        turn(ring)

    monkeypatch.setattr(PinnedRing, "turn", recorded)
    return turned


def settings_of(backend: str) -> EngineConfig:
    return EngineConfig(
        model_path=Path("unread"),
        attention_backend=backend,
        num_blocks=12,
        max_model_len=64,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
    )


def make_engine(model: LoadedModel, backend: str) -> Engine:
    return build_engine(model, settings_of(backend))


def replay_in_pieces(program: Program) -> Program:
    """Stands in for a CUDA graph: what it would launch is launched anew. Implements `Capture`."""
    program()
    return program


def capture(engine: Engine) -> list[str]:
    """Give an engine graphs, and return what is told of it."""
    assert isinstance(engine.runner, ModelRunner)
    told: list[str] = []
    engine.runner.capture(replay_in_pieces, lambda _, what: told.append(what))
    assert not engine.runner._batch.token_ids[:-1].any(), "what fills up a step was drawn for a slot"
    return told


def make_requests(count: int, max_tokens: int = 4) -> list[Request]:
    """Return requests of unlike lengths: the first of them ends soonest."""
    return [
        Request(
            number,
            PROMPT[number : 2 * number + 9],
            number + 9,
            SAMPLINGS[number % len(SAMPLINGS)],
            StoppingParams(max_tokens + number, ignore_eos=True),
            arrival=number,
        )
        for number in range(count)
    ]


def generate(engine: Engine, requests: list[Request], *, depth: int = 0) -> dict[int, list[int]]:
    """Run requests through the engine's loop. Returns their tokens."""
    core = EngineCore(engine.scheduler, engine.runner, depth=depth)
    tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
    running = set(tokens)

    def on_output(output: Output) -> None:
        assert isinstance(output, StepResult)
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            tokens[request_id].append(token_id)
        for ended in output.ended:
            assert ended.error == ""
            running.discard(ended.request_id)
        if not running:
            core.send(Stop())

    for request in requests:
        core.send(Add(request))
    core.run(on_output)
    return tokens


def test_eight_steps_on_kernels_give_the_tokens_of_the_cpu_path(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(make_engine(llama, "auto"), make_requests(3, max_tokens=6))
    assert [len(tokens) for tokens in expected.values()] == [6, 7, 8]
    engine = make_engine(llama, "triton")
    assert engine.capacity.attention_backend == "triton"
    steps, turned = forbid_host_reads(engine, monkeypatch), count_turns(monkeypatch)
    assert generate(engine, make_requests(3, max_tokens=6), depth=1) == expected
    assert len(turned) == sum(map(bool, steps)), "a step's numbers were not in a buffer of its own"


def test_steps_filled_up_to_buckets_give_the_same_tokens(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three sequences and fewer, whole prompts and decodes, and with a grammar."""
    expected = generate(make_engine(llama, "auto"), with_grammar(make_requests(3)))
    engine = make_engine(llama, "triton")
    told = capture(engine)
    assert told == [f"capturing steps of {size} tokens" for size in (32, 5, 4, 2, 1)] + ["captured"]
    forbid_host_reads(engine, monkeypatch)
    assert generate(engine, with_grammar(make_requests(3)), depth=1) == expected
    assert all(token % 2 for token in expected[1])


def with_grammar(requests: list[Request]) -> list[Request]:
    requests[1].grammar = AllowOdd()
    return requests


def test_forks_copy_the_block_they_share_in_part(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three choices of one prompt, which ends within a block."""
    copied: list[int] = []

    def record(kv: Tensor, sources: Tensor, destinations: Tensor) -> None:
        copied.append(len(sources))
        copy_blocks(kv, sources, destinations)

    monkeypatch.setattr("kvern.engine.runner.copy_blocks", record)
    expected = generate(make_engine(llama, "auto"), make_choices(3))
    assert copied == []
    assert generate(make_engine(llama, "triton"), make_choices(3)) == expected
    assert copied == [2]


def make_choices(count: int) -> list[Request]:
    first = Request(0, PROMPT[:21], 21, SamplingParams(1.0, seed=3), StoppingParams(3, ignore_eos=True))
    forks = [
        Request(
            number, PROMPT[:21], 21, SamplingParams(1.0, seed=3 + number), first.stopping, choice=number, fork_of=first
        )
        for number in range(1, count)
    ]
    return [first, *forks]


def test_a_block_that_is_copied_from_and_to_is_copied_in_order(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was given up after it was to be read: programs of one launch might write it first."""
    runner = make_engine(llama, "triton").runner
    assert isinstance(runner, ModelRunner)
    copied: list[tuple[list[int], list[int]]] = []
    monkeypatch.setattr(
        "kvern.engine.runner.copy_blocks",
        lambda _, sources, destinations: copied.append((sources.tolist(), destinations.tolist())),
    )
    runner._copy_blocks([(1, 2), (3, 4)])
    runner._copy_blocks([(5, 6), (7, 5)])
    assert copied == [([1, 3], [2, 4]), ([5], [6]), ([7], [5])]


def test_warm_up_masks_a_step_that_is_sampled_piece_by_piece(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mask is a kernel of its own, which must not be compiled while requests wait."""
    masked: list[int] = []
    monkeypatch.setattr(TokenBitmask, "apply", lambda mask, logits: masked.append(len(mask.rows)))
    engine = make_engine(llama, "triton")
    for _ in range(2):  # a request that stayed would be known already
        run_under_grammar(engine.runner, settings_of("triton"))
    assert masked == [1, 1]


def test_what_fills_up_a_step_reaches_no_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 9 tokens runs as a step of 32, and gives the tokens of the CPU's own path."""
    tiny_models.save_tiny(tmp_path, "Mixtral", num_hidden_layers=1, num_local_experts=4)
    model = load(tmp_path)
    expected = generate(make_engine(model, "auto"), make_requests(1, max_tokens=2))
    engine = make_engine(model, "triton")
    capture(engine)
    is_routed: list[list[bool]] = []
    routed = FusedOps.experts

    def record(ops: FusedOps, x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        is_routed.append((ids >= 0).all(dim=1).tolist())
        return routed(ops, x, gate_up, down, ids, weights)

    monkeypatch.setattr(FusedOps, "experts", record)
    assert generate(engine, make_requests(1, max_tokens=2)) == expected
    assert is_routed == [[True] * 9 + [False] * 23, [True]]
