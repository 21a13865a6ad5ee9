"""Streams that outlive their replicas, on a router process with scripted replicas; what these send is made by the
detokenizer's own parts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvern.services.detokenizer.incremental_decode import DecoderFactory
from kvern.services.runtime.errors import Internal, InvalidArgument, ResourceExhausted, Unavailable
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import Tokenizer, load_tokenizer
from kvern.v1 import inference_pb2, replica_pb2
from tests.for_ever import for_ever
from tests.services.detokenizer.driver import Driver, Output, ended

from . import scripted
from .answers import answer_of
from .conftest import starting
from .setup import Call, Setup
from .test_router import detail, failure

pytestmark = pytest.mark.asyncio(loop_scope="module")

Frames = AsyncIterator[replica_pb2.ServeResponse]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(find_model("smollm2"))


@pytest.fixture(scope="module")
def decoders(tokenizer: Tokenizer) -> DecoderFactory:
    return DecoderFactory(tokenizer)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def failing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setup]:
    """A router for replicas that fail so often that a circuit may be left open, which is nothing for other tests."""
    async with starting(tmp_path_factory.mktemp("router")) as setup:
        yield setup


class Replicas:
    """All replicas of a router: each would answer alike, and the first ones asked break after so many messages."""

    def __init__(self, decoders: DecoderFactory, outputs: dict[int, Output], tokens_a_step: int = 1) -> None:
        self._decoders = decoders
        self._outputs = outputs
        self._tokens_a_step = tokens_a_step
        self.breaks: list[tuple[int, Exception]] = []
        """How many messages each stream brings, and how it ends. Without one, a stream runs to its end."""
        self.whole: list[replica_pb2.ServeResponse] | None = None
        """What a stream that resumes nothing brings: always in the same messages."""

    async def frames(self, request: inference_pb2.GenerateRequest) -> list[replica_pb2.ServeResponse]:
        driver = Driver(self._decoders, self._outputs, self._tokens_a_step)
        cached_tokens = 3 + len(request.resume.choices)
        started, *rest = await driver.run(request)
        return [started, scripted.scheduled(cached_tokens), *(with_cached(frame, cached_tokens) for frame in rest)]

    async def __call__(self, request: inference_pb2.GenerateRequest) -> Frames:
        num_frames, error = self.breaks.pop(0) if self.breaks else (None, None)
        if self.whole is None:
            self.whole = await self.frames(request)
        for frame in (await self.frames(request) if request.HasField("resume") else self.whole)[:num_frames]:
            yield frame
        if error is not None:
            raise error


def with_cached(frame: replica_pb2.ServeResponse, cached_tokens: int) -> replica_pb2.ServeResponse:
    event = inference_pb2.GenerateResponse.FromString(frame.client_frame)
    if event.HasField("finished"):
        event.finished.usage.cached_tokens = cached_tokens
        frame.client_frame = event.SerializeToString()
    return frame


def lost() -> Exception:
    return Unavailable("the engine is gone")


def cancelled_there() -> Exception:
    metadata = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, metadata, metadata, "shutting down")


def reset(setup: Setup, replicas: scripted.Behaviour) -> None:
    for replica in setup.replicas:
        replica.reset()
    setup.behave(replicas)


PIECES = st.sampled_from(["a", "b", " ab", "日", "😀", "é", "<|im_end|>", "\n"])


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
async def test_stream_cut_anywhere_is_what_it_would_have_been(
    failing: Setup, tokenizer: Tokenizer, decoders: DecoderFactory, data: st.DataObject
) -> None:
    """Every position of every stream, and some of the next replica's."""
    texts = data.draw(st.lists(st.lists(PIECES, min_size=1, max_size=6).map("".join), min_size=1, max_size=2))
    ids = [[*tokenizer.encode(text, add_special_tokens=False), *data.draw(st.lists(st.integers(0, 300), max_size=2))]
           for text in texts]  # fmt: skip
    stopping = inference_pb2.Stopping(
        max_tokens=min(map(len, ids)),
        stop=data.draw(st.lists(st.sampled_from(["ab", "b日", "<|im_end|>", "a\n"]), max_size=2)),
        include_stop=data.draw(st.booleans()),
    )
    output = inference_pb2.Output(
        echo=data.draw(st.booleans()),
        token_ids=data.draw(st.booleans()),
        logprobs=data.draw(st.sampled_from([None, 1])),
    )
    request = {
        "token_ids": inference_pb2.TokenIds(ids=tokenizer.encode("é p", add_special_tokens=False)),
        "sampling": inference_pb2.Sampling(seed=7, n=len(texts)),
        "stopping": stopping,
        "output": output,
    }
    outputs = {index: ended(index, each, stopping.max_tokens) for index, each in enumerate(ids)}
    replicas = Replicas(decoders, outputs, data.draw(st.integers(1, 2)))
    reset(failing, replicas)
    whole = await answer_of(failing.inference.Generate(inference_pb2.GenerateRequest(**request), timeout=20))  # type: ignore[arg-type]
    frames, rng = replicas.whole or [], random.Random(data.draw(st.integers()))
    for cut in range(len(frames) + 1):
        brings_tokens = any(update.new_token_ids for frame in frames[:cut] for update in frame.updates)
        replicas.breaks = [(cut, rng.choice([lost, cancelled_there])())]
        if brings_tokens:
            replicas.breaks.append((rng.randint(0, 4), lost()))
        answer = await answer_of(failing.inference.Generate(inference_pb2.GenerateRequest(**request), timeout=20))  # type: ignore[arg-type]
        assert answer.content == whole.content, cut
        assert cut < 2 or answer.cached_tokens == whole.cached_tokens


@pytest.fixture
def story(tokenizer: Tokenizer, decoders: DecoderFactory) -> Replicas:
    """Eight tokens."""
    ids = tokenizer.encode(" one two three four five six seven eight", add_special_tokens=False)
    assert len(ids) == 8
    return Replicas(decoders, {0: ended(0, ids, 8)})


def ask(setup: Setup, **fields: object) -> Call:
    request = {"sampling": inference_pb2.Sampling(seed=7), "stopping": inference_pb2.Stopping(max_tokens=8)} | fields
    return setup.inference.Generate(
        inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5, 6]), **request),  # type: ignore[arg-type]
        timeout=20,
    )


async def test_moved_request_is_aged_and_carries_what_came_and_no_more(setup: Setup, story: Replicas) -> None:
    setup.behave(story)
    story.breaks = [(5, lost())]
    answer = await answer_of(ask(setup))
    [first, second] = [replica.last for replica in setup.replicas if replica.received]
    if first.moved:
        first, second = second, first
    assert (first.moved, second.moved) == (False, True)
    assert 0 <= first.age_s < second.age_s < 20
    [progress] = second.request.resume.choices
    assert (second.request.resume.seed, len(progress.token_ids), progress.text_bytes) == (7, 3, len(" one two three"))
    second.request.ClearField("resume")
    assert first.request == second.request
    [timing] = answer.timings
    assert timing.migrations == 1
    assert timing.total_s > timing.time_to_first_token_s > 0


async def test_clients_own_resume_that_breaks_again_goes_on_where_both_left_off(
    setup: Setup, story: Replicas, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(" one two three", add_special_tokens=False)
    resume = inference_pb2.Resume(
        seed=7, choices=[inference_pb2.ChoiceProgress(token_ids=ids, text_bytes=len(" one two three"))]
    )
    setup.behave(story)
    story.breaks = [(4, lost())]
    answer = await answer_of(ask(setup, resume=resume))
    assert answer.text[0] == " four five six seven eight"
    assert answer.events.count("started") == 1


@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_two_streams_in_a_row_without_a_new_token_end_the_call_as_poison(
    setup: Setup, story: Replicas, num_tokens: int
) -> None:
    setup.behave(story)
    story.breaks = [*([(2 + num_tokens, lost())] if num_tokens else []), (1, lost()), (2, lost())]
    error = await failure(ask(setup))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert detail(error, error_details_pb2.ErrorInfo).reason == "POISON"
    assert story.breaks == []
    assert len(setup.received()) == 2 + bool(num_tokens)


async def test_streams_of_which_every_other_brings_a_token_go_on_for_ever(setup: Setup, story: Replicas) -> None:
    setup.behave(story)
    story.breaks = [(num_frames, lost()) for num_frames in (1, 3, 2, 3, 1, 3)]
    answer = await answer_of(ask(setup))
    assert answer.text[0] == " one two three four five six seven eight"
    assert answer.timings[0].migrations == 6


async def test_stream_that_breaks_behind_its_last_message_is_whole(setup: Setup, story: Replicas) -> None:
    setup.behave(story)
    story.breaks = [(2 + 8 + 1, lost())]
    assert (await answer_of(ask(setup))).events[-1] == "finished"
    assert len(setup.received()) == 1


async def test_stream_that_broke_waits_for_a_replica_that_is_ready(setup: Setup, story: Replicas) -> None:
    """The only one restarts."""
    [only, *_] = setup.replicas
    setup.behave(story)
    await setup.use(only)
    story.breaks = [(4, lost()), (0, lost()), (0, lost())]
    assert (await answer_of(ask(setup))).text[0] == " one two three four five six seven eight"
    assert len(only.received) == 4


async def test_stream_goes_on_with_the_weights_it_began_with(setup: Setup, story: Replicas) -> None:
    """F21: two versions of one model are never mixed, though one would answer sooner."""
    for replica in setup.replicas[1:3]:
        replica.contract = "other"
    await setup.poll()
    await setup.statuses(lambda all_: [each.engine.contract for each in all_] == ["c", "other", "other", "c"])
    setup.behave(story)
    for _ in range(4):
        story.breaks = [(5, lost())]
        assert (await answer_of(ask(setup))).text[0].endswith(" eight")
        asked = {replica.contract for replica in setup.replicas if replica.received}
        assert len(asked) == 1
        for replica in setup.replicas:
            replica.received.clear()


async def test_streams_of_a_replica_that_died_are_spread_over_the_others(setup: Setup) -> None:
    """The herd: F08."""
    may_die = asyncio.Event()
    first, *others = setup.replicas

    async def die(request: inference_pb2.GenerateRequest) -> Frames:
        yield scripted.started(request)
        await may_die.wait()
        raise lost()

    async def go_on(request: inference_pb2.GenerateRequest) -> Frames:
        yield scripted.started(request)
        await for_ever()

    await setup.use(first)
    first.behaviour = die
    calls = [setup.generate() for _ in range(6)]
    for call in calls:
        assert (await call.read()).HasField("started")
    for replica in others:
        replica.behaviour = go_on
    await setup.use(*setup.replicas)
    may_die.set()
    spread = {first.address: 0} | {replica.address: 2 for replica in others}
    await setup.statuses(lambda all_: {each.address: each.num_in_flight for each in all_} == spread)
    for call in calls:
        call.cancel()


def full() -> Exception:
    return ResourceExhausted("all streams are taken", retry_after_s=7.0)


async def test_full_replica_is_passed_over_once_then_its_verdict_stands(setup: Setup, story: Replicas) -> None:
    """A27."""
    setup.behave(story)
    story.breaks = [(0, full())]
    assert (await answer_of(ask(setup))).text[0].endswith("eight")
    story.breaks = [(0, full()) for _ in range(9)]
    error = await failure(ask(setup))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds == 7
    assert len(story.breaks) == 7


@pytest.mark.parametrize("verdict", [InvalidArgument("stop", "no"), Internal("a fault"), full()])
async def test_verdict_in_mid_stream_is_the_clients(setup: Setup, story: Replicas, verdict: Exception) -> None:
    setup.behave(story)
    story.breaks = [(4, verdict)]
    error = await failure(ask(setup))
    assert error.code() is not grpc.StatusCode.UNAVAILABLE
    assert len(setup.received()) == 1


async def test_deadline_that_no_replica_can_meet_is_refused_at_once(setup: Setup) -> None:
    waits = [21.0, 20.0, 21.0, 21.0]
    for replica, wait_s in zip(setup.replicas, waits, strict=True):
        replica.load.predicted_wait_s = wait_s
    await setup.poll()
    await setup.statuses(lambda all_: [each.load.predicted_wait_s for each in all_] == waits)
    error = await failure(setup.generate(timeout=5))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.ErrorInfo).reason == "DEADLINE_UNREACHABLE"
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds == 20
    assert setup.received() == []
    assert (await answer_of(setup.generate(timeout=None))).events[-1] == "finished"
