"""What a caller has received of a generation, and what is therefore left to ask for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from kvern.v1 import inference_pb2 as pb

Event: TypeAlias = pb.Started | pb.Scheduled | pb.PromptLogprobs | pb.Delta | pb.Finished


class Progress:
    """Follows one generation over one or several calls.

    It says what each call has to ask for, and drops from what comes that which the caller has already. It knows
    nothing of how calls are made, and times are whatever clock it is given.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = pb.GenerateRequest()
        self._request.CopyFrom(request)
        self._shows_token_ids = request.output.token_ids
        self._request.output.token_ids = True  # what a broken stream is resumed with
        self._unfinished = {choice.index: choice for choice in _choices(request)}
        self._started: pb.Started | None = None
        self._scheduled: pb.Scheduled | None = None
        self._num_prompt_positions = 0
        self._started_at = self._call_started_at = 0.0
        self._first_token_s: dict[int, float] = {}
        """Of each choice that has tokens, from Started on."""
        self.has_output = False
        """Whether anything of the answer came: from then on a call resumes, before it begins anew."""
        self.call_has_started = False
        self.call_has_output = False

    @property
    def is_finished(self) -> bool:
        return not self._unfinished

    def begin_call(self) -> pb.GenerateRequest:
        """Return what the next call has to ask for. It stays this object's."""
        self.call_has_started = self.call_has_output = False
        request = self._request
        if self.has_output or request.HasField("resume"):
            seed = request.resume.seed if self._started is None else self._started.seed
            request.resume.CopyFrom(pb.Resume(seed=seed, choices=self._unfinished.values()))
        elif self._started is not None:
            request.sampling.seed = self._started.seed  # the one that the caller was told
        return request

    def take(self, response: pb.GenerateResponse, now: float) -> Event | None:
        """Return what is new to the caller in a response, None if nothing is. `now` in seconds."""
        match response.WhichOneof("event"):
            case "started":
                return self._take_started(response.started, now)
            case "scheduled":
                return self._take_scheduled(response.scheduled)
            case "prompt_logprobs":
                return self._take_prompt_logprobs(response.prompt_logprobs)
            case "delta":
                return self._take_delta(response.delta, now)
            case "finished":
                return self._take_finished(response.finished)
        return None

    def _take_started(self, started: pb.Started, now: float) -> pb.Started | None:
        self.call_has_started = True
        self._call_started_at = now
        if self._started is not None:
            return None
        self._started, self._started_at = started, now
        return started

    def _take_scheduled(self, scheduled: pb.Scheduled) -> pb.Scheduled | None:
        if self._scheduled is not None:
            return None
        self._scheduled = scheduled
        return scheduled

    def _take_prompt_logprobs(self, piece: pb.PromptLogprobs) -> pb.PromptLogprobs | None:
        end = piece.start + len(piece.items)
        num_known = max(0, self._num_prompt_positions - piece.start)
        if num_known >= len(piece.items):
            return None
        self._num_prompt_positions = end
        del piece.items[:num_known]
        piece.start += num_known
        return piece

    def _take_delta(self, delta: pb.Delta, now: float) -> pb.Delta | None:
        self.has_output = self.call_has_output = True
        self._first_token_s.setdefault(delta.index, now - self._started_at)
        choice = self._unfinished[delta.index]
        choice.token_ids.extend(delta.token_ids)
        choice.text_bytes += len(delta.text.encode())
        if not self._shows_token_ids:
            delta.ClearField("token_ids")
        # A token without text yet is sent for its id alone.
        return delta if delta.text or delta.token_ids or delta.logprobs else None

    def _take_finished(self, finished: pb.Finished) -> pb.Finished:
        self.has_output = self.call_has_output = True
        del self._unfinished[finished.index]
        if self._call_started_at > self._started_at:
            self._count_from_first_call(finished)
        return finished

    def _count_from_first_call(self, finished: pb.Finished) -> None:
        """Mend what a later call counts from its own start."""
        earlier_s = self._call_started_at - self._started_at
        timing = finished.timing
        timing.total_s += earlier_s
        timing.time_to_first_token_s = self._first_token_s.get(finished.index, timing.time_to_first_token_s + earlier_s)
        if self._scheduled is not None:
            timing.queue_s = self._scheduled.queue_s
            finished.usage.cached_tokens = self._scheduled.cached_tokens


def _choices(request: pb.GenerateRequest) -> Iterable[pb.ChoiceProgress]:
    if request.HasField("resume"):
        return map(_copy, request.resume.choices)
    num_choices = request.sampling.n if request.sampling.HasField("n") else 1
    return (pb.ChoiceProgress(index=index) for index in range(num_choices))


def _copy(choice: pb.ChoiceProgress) -> pb.ChoiceProgress:
    copied = pb.ChoiceProgress()
    copied.CopyFrom(choice)
    return copied
