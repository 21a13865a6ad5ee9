"""A stream that breaks is taken up where it broke, and its caller does not notice."""

from __future__ import annotations

import grpc
import pytest

from kvern.client import Delta, Event, Finished, KvernError, RetryPolicy
from kvern.services.runtime.errors import AlreadyExists, Internal, InvalidArgument, ResourceExhausted, Unavailable
from kvern.v1 import inference_pb2 as pb

from .conftest import Run, Serve
from .proxy import Proxy
from .scripted_server import SEED, delta, finished, responds, scheduled, stalls_after, started

AWAY = Unavailable("the engine is away")
BEGUN = responds(started(), scheduled(), delta("Hel", 1, 2), AWAY)
REST = (started(seed=SEED, request_id="r2"), scheduled(cached_tokens=7))


def _texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Delta)]


def test_broken_stream_is_resumed_and_nothing_comes_twice(run: Run, serve: Serve) -> None:
    """`delta("", 3)` is a token whose text is incomplete: the server has to know it, the caller not."""
    server = serve(
        responds(started(), scheduled(), delta("Hel", 1, 2), delta("", 3), AWAY),
        responds(*REST, delta("lo", 4), finished()),
    )
    events = run(server, pb.GenerateRequest(text="Hi", sampling=pb.Sampling(temperature=0.5)))
    assert events[:-1] == [started().started, scheduled().scheduled, pb.Delta(text="Hel"), pb.Delta(text="lo")]
    assert isinstance(events[-1], Finished)
    first, second = server.received
    assert not first.HasField("resume")
    assert second.resume == pb.Resume(seed=SEED, choices=[pb.ChoiceProgress(token_ids=[1, 2, 3], text_bytes=3)])
    second.ClearField("resume")
    assert second == first


def test_bytes_of_text_are_counted_in_utf8_over_every_break(run: Run, serve: Serve) -> None:
    server = serve(
        responds(started(), delta("ď", 1), AWAY),
        responds(*REST, delta("日", 2), AWAY),
        responds(*REST, delta("!", 3), finished()),
    )
    assert _texts(run(server)) == ["ď", "日", "!"]
    (progress,) = server.received[-1].resume.choices
    assert (progress.text_bytes, list(progress.token_ids)) == (5, [1, 2])


def test_token_ids_reach_a_caller_that_asked_for_them(run: Run, serve: Serve) -> None:
    server = serve(BEGUN, responds(*REST, delta("", 3), delta("lo", 4), finished()))
    events = run(server, pb.GenerateRequest(text="Hi", output=pb.Output(token_ids=True)))
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [list(each.token_ids) for each in deltas] == [[1, 2], [3], [4]]


def test_only_choices_without_an_end_are_resumed(run: Run, serve: Serve) -> None:
    server = serve(
        responds(started(), delta("a", 1), finished(0), delta("b", 2, index=1), AWAY),
        responds(*REST, delta("c", 3, index=1), delta("d", 4, index=2), finished(2), finished(1)),
    )
    events = run(server, pb.GenerateRequest(text="Hi", sampling=pb.Sampling(n=3)))
    assert [event.index for event in events if isinstance(event, Finished)] == [0, 2, 1]
    assert list(server.received[1].resume.choices) == [
        pb.ChoiceProgress(index=1, token_ids=[2], text_bytes=1),
        pb.ChoiceProgress(index=2),
    ]


@pytest.mark.parametrize("error", [AWAY, Internal("a fault")])
def test_stream_that_breaks_behind_its_last_message_has_ended_well(run: Run, serve: Serve, error: Exception) -> None:
    server = serve(responds(started(), delta("Hi", 1), finished(), error))
    assert len(run(server)) == 3
    assert len(server.received) == 1


def test_stream_that_breaks_often_goes_on_as_long_as_tokens_come(run: Run, serve: Serve) -> None:
    breaks = [responds(*REST, delta(str(number), number), AWAY) for number in range(20)]
    server = serve(BEGUN, *breaks, responds(*REST, finished()))
    assert _texts(run(server)) == ["Hel", *map(str, range(20))]


def test_stream_without_progress_twice_in_a_row_is_given_up(run: Run, serve: Serve) -> None:
    barren = responds(*REST, AWAY)
    server = serve(BEGUN, barren, responds(*REST, delta("lo", 3), AWAY), barren, barren)
    received: list[Event] = []
    with pytest.raises(KvernError) as failed:
        run(server, on_event=received.append)
    assert failed.value.code is grpc.StatusCode.UNAVAILABLE
    assert _texts(received) == ["Hel", "lo"]
    assert len(server.received) == 5


def test_resumption_waits_for_a_server_that_is_away_or_full(run: Run, serve: Serve) -> None:
    full = ResourceExhausted("full", retry_after_s=0.001)
    away = [responds(AWAY)] * 5
    server = serve(BEGUN, *away, responds(full), responds(*REST, delta("lo", 3), finished()))
    assert _texts(run(server)) == ["Hel", "lo"]


def test_resumptions_that_fail_are_bounded(run: Run, serve: Serve) -> None:
    server = serve(BEGUN, responds(AWAY))
    with pytest.raises(KvernError, match="the engine is away"):
        run(server, retry=RetryPolicy(max_resumptions=3, first_delay_s=0.001))
    assert len(server.received) == 1 + 3


@pytest.mark.parametrize(
    "verdict", [InvalidArgument("text", "no"), ResourceExhausted("parked for 60 s", retry_after_s=0.001)]
)
def test_stream_that_its_server_ended_on_purpose_is_not_resumed(run: Run, serve: Serve, verdict: Exception) -> None:
    server = serve(responds(started(), delta("a", 1), verdict))
    with pytest.raises(KvernError, match=verdict.message):
        run(server)
    assert len(server.received) == 1


def test_id_that_the_caller_chose_is_kept_and_waited_for(run: Run, serve: Serve) -> None:
    """The router may not know yet that the first stream broke."""
    taken = AlreadyExists("request_id 'mine' is in flight")
    server = serve(BEGUN, responds(taken), responds(taken), responds(*REST, finished()))
    assert isinstance(run(server, pb.GenerateRequest(request_id="mine", text="Hi"))[-1], Finished)
    assert {request.request_id for request in server.received} == {"mine"}


def test_id_that_another_request_holds_is_refused_at_once(run: Run, serve: Serve) -> None:
    """C27."""
    server = serve(responds(AlreadyExists("request_id 'mine' is in flight")))
    with pytest.raises(KvernError) as refused:
        run(server, pb.GenerateRequest(request_id="mine", text="Hi"))
    assert refused.value.code is grpc.StatusCode.ALREADY_EXISTS
    assert len(server.received) == 1


def test_id_that_the_server_chose_is_not_sent_back(run: Run, serve: Serve) -> None:
    server = serve(BEGUN, responds(*REST, finished()))
    assert run(server)[0] == started(request_id="r1").started
    assert [request.request_id for request in server.received] == ["", ""]


def test_finished_counts_from_the_first_call(run: Run, serve: Serve) -> None:
    late = finished(cached_tokens=7, queue_s=0.0, time_to_first_token_s=0.25, total_s=1000.0)
    server = serve(BEGUN, responds(*REST, delta("lo", 3), late))
    end = run(server)[-1]
    assert isinstance(end, Finished)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (7, 3)
    assert (end.usage.cached_tokens, end.timing.queue_s) == (4, 0.5)
    assert end.timing.total_s > 1000.0
    assert end.timing.time_to_first_token_s != 0.25


def test_finished_of_an_unbroken_stream_is_left_as_it_is(run: Run, serve: Serve) -> None:
    end = finished(queue_s=0.5, time_to_first_token_s=0.25, total_s=1.0)
    server = serve(responds(started(), scheduled(cached_tokens=1), delta("a", 1), end))
    assert run(server)[-1] == end.finished


def test_prompt_logprobs_that_came_before_the_break_do_not_come_twice(run: Run, serve: Serve) -> None:
    first, second = _prompt_logprobs(1, 5, 6), _prompt_logprobs(1, 5, 6, 7)
    server = serve(responds(started(), first, AWAY), responds(started(), second, delta("a", 1), finished()))
    events = run(server)
    pieces = [event for event in events if isinstance(event, pb.PromptLogprobs)]
    assert pieces == [_prompt_logprobs(1, 5, 6).prompt_logprobs, _prompt_logprobs(3, 7).prompt_logprobs]


def _prompt_logprobs(start: int, *token_ids: int) -> pb.GenerateResponse:
    items = [pb.TokenLogprobs(sampled=pb.TokenLogprob(token_id=token_id)) for token_id in token_ids]
    return pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(start=start, items=items))


def test_request_of_a_caller_that_resumes_by_itself_goes_on_from_there(run: Run, serve: Serve) -> None:
    """Say, from a stream that another process received. The caller's message is not touched."""
    resume = pb.Resume(seed=3, choices=[pb.ChoiceProgress(index=1, token_ids=[1], text_bytes=1)])
    request = pb.GenerateRequest(text="Hi", sampling=pb.Sampling(n=2), resume=resume)
    server = serve(
        responds(started(seed=3), delta("b", 2, index=1), AWAY), responds(started(seed=3), finished(index=1))
    )
    run(server, request)
    assert server.received[0].resume == resume == request.resume
    assert server.received[1].resume == pb.Resume(
        seed=3, choices=[pb.ChoiceProgress(index=1, token_ids=[1, 2], text_bytes=2)]
    )


def test_stream_that_ends_before_its_choices_is_an_error(run: Run, serve: Serve) -> None:
    with pytest.raises(KvernError, match="before every choice had finished"):
        run(serve(responds(started(), delta("a", 1))))


def test_connection_that_is_cut_is_a_broken_stream(run: Run, serve: Serve) -> None:
    server = serve(stalls_after(started(), delta("Hel", 1, 2)), responds(*REST, delta("lo", 3), finished()))
    with Proxy(server.address) as wire:
        cut = pb.Delta(text="Hel")
        events = run(wire, on_event=lambda event: wire.cut() if event == cut else None, retry=RetryPolicy())
    assert _texts(events) == ["Hel", "lo"]
