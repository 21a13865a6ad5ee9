"""What a client has, and what of another replica's stream is news to it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvern.services.router.progress import Progress, Source
from kvern.v1.inference_pb2 import (
    ChoiceProgress,
    Delta,
    Finished,
    GenerateRequest,
    GenerateResponse,
    PromptLogprobs,
    Resume,
    Sampling,
    Scheduled,
    Started,
    Timing,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from kvern.v1.replica_pb2 import ServeResponse

FIRST = Source(opened_at=100.0)
SECOND = Source(opened_at=103.0, num_moves=1)


def frame(**event: object) -> ServeResponse:
    return ServeResponse(client_frame=GenerateResponse(**event).SerializeToString())  # type: ignore[arg-type]


def delta(ids: Sequence[int], total: int, index: int = 0) -> ServeResponse:
    told = frame(delta=Delta(index=index))
    told.updates.add(index=index, new_token_ids=ids, text_bytes_total=total)
    return told


def finished(**fields: object) -> ServeResponse:
    told = frame(finished=Finished(**fields))  # type: ignore[arg-type]
    told.updates.add(index=0, finished=True)
    return told


def prompt_logprobs(*positions: int) -> ServeResponse:
    items = [TokenLogprobs(sampled=TokenLogprob(token_id=position)) for position in positions]
    return frame(prompt_logprobs=PromptLogprobs(start=positions[0], items=items))


def begun(request: GenerateRequest | None = None) -> Progress:
    progress = Progress(request or GenerateRequest(sampling=Sampling(seed=7)))
    progress.open(FIRST)
    return progress


def passed(progress: Progress, source: Source, *frames: ServeResponse) -> list[GenerateResponse]:
    taken = [progress.take(each, source) for each in frames]
    return [GenerateResponse.FromString(each) for each in taken if each is not None]


def test_started_and_scheduled_are_told_once() -> None:
    progress = begun()
    heads = [frame(started=Started(seed=7)), frame(scheduled=Scheduled(cached_tokens=3, queue_s=1.0))]
    assert passed(progress, FIRST, *heads) == [GenerateResponse.FromString(each.client_frame) for each in heads]
    assert passed(progress, SECOND, *heads) == []


def test_scheduled_that_comes_late_counts_from_the_first_stream() -> None:
    progress = begun()
    passed(progress, FIRST, frame(started=Started()))
    [told] = passed(progress, SECOND, frame(started=Started()), frame(scheduled=Scheduled(queue_s=1.0)))
    assert told.scheduled.queue_s == 4.0


@pytest.mark.parametrize("cut", range(4))
def test_prompt_logprobs_are_told_once_wherever_pieces_are_cut(cut: int) -> None:
    progress = begun()
    first, rest = [1, 2, 3][:cut], [prompt_logprobs(1, 2), prompt_logprobs(3, 4), prompt_logprobs(5)]
    told = passed(progress, FIRST, *([prompt_logprobs(*first)] if first else []))
    told += passed(progress, SECOND, *rest)
    positions = [item.sampled.token_id for each in told for item in each.prompt_logprobs.items]
    assert positions == [1, 2, 3, 4, 5]
    assert all(each.prompt_logprobs.start == each.prompt_logprobs.items[0].sampled.token_id for each in told)


def test_frames_are_passed_on_untouched_while_nothing_moved() -> None:
    progress = begun()
    unknown = b"\xfa\x7f\x03new"
    last = finished(usage=Usage(cached_tokens=5), timing=Timing(total_s=1.0))
    for each in (ServeResponse(client_frame=unknown), delta([1], 1), last):
        assert progress.take(each, FIRST) == each.client_frame


def test_resume_holds_what_came_of_choices_that_had_not_finished() -> None:
    progress = begun(GenerateRequest(sampling=Sampling(seed=7, n=3)))
    passed(progress, FIRST, delta([1, 2], 5, index=1), delta([3], 9, index=1), finished())
    assert progress.resume == Resume(
        seed=7, choices=[ChoiceProgress(index=1, token_ids=[1, 2, 3], text_bytes=9), ChoiceProgress(index=2)]
    )
    assert not progress.is_finished


def test_resume_of_a_clients_own_resume_has_both() -> None:
    resume = Resume(seed=7, choices=[ChoiceProgress(index=2, token_ids=[1], text_bytes=4)])
    progress = begun(GenerateRequest(sampling=Sampling(seed=7, n=3), resume=resume))
    passed(progress, FIRST, delta([2], 6, index=2))
    assert progress.resume == Resume(seed=7, choices=[ChoiceProgress(index=2, token_ids=[1, 2], text_bytes=6)])


def test_numbers_in_finished_are_those_of_the_whole_request() -> None:
    progress = begun()
    passed(progress, FIRST, frame(started=Started()), frame(scheduled=Scheduled(cached_tokens=3, queue_s=0.5)))
    [told] = passed(
        progress,
        SECOND,
        finished(
            usage=Usage(prompt_tokens=9, cached_tokens=8, completion_tokens=4),
            timing=Timing(queue_s=2.0, total_s=6.0, preemptions=2),
        ),
    )
    assert told.finished.usage == Usage(prompt_tokens=9, cached_tokens=3, completion_tokens=4)
    assert told.finished.timing == Timing(queue_s=0.5, total_s=9.0, preemptions=2, migrations=1)
    assert progress.is_finished
