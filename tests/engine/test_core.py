from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from kvern.engine.block_pool import BlockPool
from kvern.engine.core import Abort, Add, EngineCore, Output, Park, Refused, ResetCache, Stop, TakeSnapshot, Unpark
from kvern.engine.plan import FirstScheduled, Plan, StepResult, StepStats
from kvern.engine.request import Request, SamplingParams, StoppingParams
from kvern.engine.scheduler import Scheduler, SchedulerConfig

from .checked_runner import CheckedRunner, LazyStep
from .plain_model import expected_output

NUM_BLOCKS = 16


def make_request(number: int, prompt: list[int], max_tokens: int) -> Request:
    return Request(number, list(prompt), len(prompt), SamplingParams(), StoppingParams(max_tokens), arrival=number)


def make_core(runner: CheckedRunner | None = None, *, depth: int = 0) -> EngineCore:
    config = SchedulerConfig(
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        eos_token_ids=frozenset(),
        contract="test",
    )
    scheduler = Scheduler(BlockPool(NUM_BLOCKS, record_events=True), config)
    return EngineCore(scheduler, runner or CheckedRunner(NUM_BLOCKS, 4), depth=depth)


@contextmanager
def running(core: EngineCore) -> Iterator[SimpleQueue[Output]]:
    outputs: SimpleQueue[Output] = SimpleQueue()
    thread = threading.Thread(target=core.run, args=(outputs.put,))
    thread.start()
    try:
        yield outputs
    finally:
        core.send(Stop())
        thread.join(timeout=10)
        assert not thread.is_alive()


def collect(outputs: SimpleQueue[Output], num_ended: int) -> tuple[dict[int, list[int]], StepResult]:
    tokens: dict[int, list[int]] = {}
    while num_ended:
        result = outputs.get(timeout=10)
        assert isinstance(result, StepResult)
        for request_id, token_id in zip(result.request_ids, result.token_ids, strict=True):
            tokens.setdefault(request_id, []).append(token_id)
        num_ended -= len(result.ended)
    return tokens, result


@pytest.mark.parametrize("depth", [0, 1])
def test_run_requests_that_arrive_one_by_one_all_end_with_their_tokens(depth: int) -> None:
    core = make_core(depth=depth)
    with running(core) as outputs:
        for number in range(6):
            core.send(Add(make_request(number, [number, 1], 8)))
        tokens, last = collect(outputs, 6)
    assert tokens == {number: expected_output([number, 1], 8) for number in range(6)}
    assert (last.load.num_running, last.load.num_used_blocks) == (0, 0)


def test_run_refused_request_is_answered_and_others_go_on() -> None:
    core = make_core()
    with running(core) as outputs:
        core.send(Add(make_request(0, [1] * 60, 8)))
        core.send(Add(make_request(1, [1], 2)))
        refused = outputs.get(timeout=10)
        assert isinstance(refused, Refused)
        assert (refused.request_id, refused.field) == (0, "stopping.max_tokens")
        tokens, _ = collect(outputs, 1)
    assert tokens == {1: expected_output([1], 2)}


class SteppedRunner(CheckedRunner):
    """Runs a step when told to."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, 4)
        self.permits = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        """Released by each step that waits to be told."""

    def submit(self, plan: Plan) -> LazyStep:
        self.begun.release()
        assert self.permits.acquire(timeout=10)
        return super().submit(plan)


def test_run_abort_frees_blocks_after_the_step_under_way() -> None:
    runner = SteppedRunner()
    core = make_core(runner)
    with running(core) as outputs:
        core.send(Add(make_request(0, [1], 60)))
        admitted = outputs.get(timeout=10)  # before its step has run
        runner.permits.release()
        first = outputs.get(timeout=10)
        for _ in range(2):
            assert runner.begun.acquire(timeout=10)
        core.send(Abort(0))
        runner.permits.release()
        under_way, after = outputs.get(timeout=10), outputs.get(timeout=10)
        assert isinstance(admitted, StepResult)
        assert isinstance(first, StepResult)
        assert isinstance(under_way, StepResult)
        assert isinstance(after, StepResult)
        assert admitted.scheduled == [FirstScheduled(0, cached_tokens=0)]
        assert (len(first.token_ids), len(under_way.token_ids), len(after.token_ids)) == (1, 1, 0)
        assert (under_way.load.num_used_blocks, after.load.num_used_blocks) == (1, 0)
        core.send(Abort(0))


def test_run_parked_request_waits_until_it_is_resumed() -> None:
    """It is parked in its first step."""
    runner = SteppedRunner()
    core = make_core(runner)
    with running(core) as outputs:
        core.send(Add(make_request(0, [1], 40)))
        assert runner.begun.acquire(timeout=10)
        core.send(Park(0))
        core.send(Add(make_request(1, [2], 3)))
        runner.permits.release(100)
        expected = expected_output([1], 40)
        assert collect(outputs, 1)[0] == {0: expected[:1], 1: expected_output([2], 3)}
        core.send(Unpark(0))
        core.send(ResetCache())
        core.send(Add(make_request(2, [3], 50)))
        assert collect(outputs, 2)[0] == {0: expected[1:], 2: expected_output([3], 50)}


class Mirror:
    """What an index would hold that applies the events as they come."""

    def __init__(self, outputs: SimpleQueue[Output]) -> None:
        self._outputs = outputs
        self.digests: set[bytes] = set()
        self.num_removed = 0

    def apply(self, output: Output) -> None:
        assert isinstance(output, StepResult)
        for event in output.cache_events:
            assert event.is_added == (event.digest not in self.digests), "each digest's events alternate"
            if event.is_added:
                self.digests.add(event.digest)
            else:
                self.digests.remove(event.digest)
                self.num_removed += 1

    def catch_up(self) -> None:
        while not self._outputs.empty():
            self.apply(self._outputs.get())


@pytest.mark.parametrize("depth", [0, 1])
def test_run_snapshot_is_what_the_events_emitted_so_far_have_led_to(depth: int) -> None:
    """Between admissions, steps and evictions: the pool is too small for what comes."""
    core = make_core(depth=depth)
    snapshots: SimpleQueue[tuple[list[bytes], set[bytes]]] = SimpleQueue()
    with running(core) as outputs:
        mirror = Mirror(outputs)

        def reply(digests: list[bytes]) -> None:
            mirror.catch_up()
            snapshots.put((digests, set(mirror.digests)))

        for number in range(12):
            core.send(Add(make_request(number, [number] * 9, 7)))
        while mirror.num_removed < 12:
            core.send(TakeSnapshot(reply))
            digests, mirrored = snapshots.get(timeout=10)
            assert len(digests) == len(mirrored)
            assert set(digests) == mirrored


def test_run_reset_of_the_cache_tells_that_everything_is_gone() -> None:
    """F04."""
    core = make_core()
    with running(core) as outputs:
        mirror = Mirror(outputs)
        core.send(Add(make_request(0, [1] * 9, 4)))
        while not mirror.digests:
            mirror.apply(outputs.get(timeout=10))
        core.send(ResetCache())
        while mirror.digests:
            mirror.apply(outputs.get(timeout=10))


@pytest.mark.parametrize("depth", [0, 1])
def test_run_tells_of_each_step_how_large_it_was_and_where_its_time_went(depth: int) -> None:
    """A runner's own phases are what it measures: this one measures none."""
    runner = CheckedRunner(NUM_BLOCKS, 4)
    core = make_core(runner, depth=depth)
    steps: list[StepStats] = []
    with running(core) as outputs:
        for number in range(3):
            core.send(Add(make_request(number, [number] * 9, 8)))
        num_ended = 0
        while num_ended < 3:
            result = outputs.get(timeout=10)
            assert isinstance(result, StepResult)
            num_ended += len(result.ended)
            if result.step is not None:
                steps.append(result.step)
            else:
                assert result.token_ids == []
    assert len(steps) == runner.num_executed
    assert sum(step.num_tokens for step in steps) == runner.num_computed_tokens
    assert max(step.num_seqs for step in steps) == runner.max_entries
    assert all(step.times.schedule_ns and step.times.commit_ns and step.times.commands_ns for step in steps)
    assert any(step.times.emit_ns for step in steps)
    assert not any(step.times.forward_ns for step in steps)


def test_run_is_idle_exactly_while_there_is_nothing_to_do() -> None:
    runner = SteppedRunner()
    core = make_core(runner)
    with running(core) as outputs:
        core.send(Add(make_request(0, [1], 1)))
        outputs.get(timeout=10)  # it is scheduled, and its step waits for a permit
        assert not core.is_idle
        runner.permits.release()
        collect(outputs, 1)
        core.send(Abort(0))
        outputs.get(timeout=10)  # the loop has come round
        deadline = time.monotonic() + 10
        while not core.is_idle:
            assert time.monotonic() < deadline


def test_run_expects_of_a_step_what_steps_like_it_took() -> None:
    core = make_core()
    with running(core) as outputs:
        core.send(Add(make_request(0, [1] * 9, 8)))
        collect(outputs, 1)
    assert core.expected_step_s is not None
    assert 0 <= core.expected_step_s < 10


def test_run_runner_that_fails_ends_the_loop_with_its_error() -> None:
    class BrokenRunner(CheckedRunner):
        def submit(self, plan: Plan) -> LazyStep:
            raise RuntimeError("the device is gone")

    core = make_core(BrokenRunner(NUM_BLOCKS, 4))
    core.send(Add(make_request(0, [1], 1)))
    with pytest.raises(RuntimeError, match="the device is gone"):
        core.run(lambda _: None)
