"""What a client has received of its request, whichever replicas it came from."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from kvern.v1 import inference_pb2, replica_pb2


@dataclass(slots=True)
class Source:
    """A replica's stream, as a client's view of time needs it."""

    opened_at: float
    """Of time.monotonic()."""
    num_moves: int = 0
    """Streams before it that broke."""
    num_tokens: int = 0
    """Output tokens it has brought."""


@dataclass(slots=True)
class _Choice:
    """An unfinished choice."""

    index: int
    token_ids: array[int]
    text_bytes: int


class Progress:
    """Follows one request over the streams it takes.

    What was received is the truth: the next replica goes on after exactly that, and what it says again of the request
    (Started, Scheduled, log-probabilities of the prompt) is dropped. The numbers in Finished are made those of the
    whole request: cached tokens and queue time stay what they were first, times count from the first stream's opening.
    """

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self._seed = request.sampling.seed
        self._unfinished = {
            choice.index: _Choice(choice.index, array("I", choice.token_ids), choice.text_bytes)
            for choice in _choices(request)
        }
        self._opened_at = 0.0
        self._first_token_at: dict[int, float] = {}
        """Of each choice that has tokens, of time.monotonic()."""
        self._has_started = False
        self._scheduled: inference_pb2.Scheduled | None = None
        self._num_prompt_positions = 0
        self.has_begun = False
        """Whether the client has received anything."""
        self.has_output = False
        """Whether it has received anything of a choice."""

    @property
    def is_finished(self) -> bool:
        return not self._unfinished

    @property
    def resume(self) -> inference_pb2.Resume:
        """Return what another replica goes on from."""
        return inference_pb2.Resume(
            seed=self._seed,
            choices=[
                inference_pb2.ChoiceProgress(
                    index=choice.index, token_ids=choice.token_ids, text_bytes=choice.text_bytes
                )
                for choice in self._unfinished.values()
            ],
        )

    def open(self, source: Source) -> None:
        """A stream is opened. Times count from the one that first brings something."""
        if not self.has_begun:
            self._opened_at = source.opened_at

    def take(self, response: replica_pb2.ServeResponse, source: Source) -> bytes | None:
        """Return the frame as the client is to have it, None if it has all that is in it."""
        self.has_begun = True
        if not response.updates:
            return self._take_event(response.client_frame, source)
        self.has_output = True
        has_end = False
        for update in response.updates:
            self._take_update(update, source)
            has_end |= update.finished
        if has_end and source.opened_at != self._opened_at:
            return self._of_whole_request(response.client_frame, source)
        return response.client_frame

    def _take_update(self, update: replica_pb2.ChoiceUpdate, source: Source) -> None:
        choice = self._unfinished[update.index]
        if update.new_token_ids:
            choice.token_ids.extend(update.new_token_ids)
            source.num_tokens += len(update.new_token_ids)
            if choice.index not in self._first_token_at:
                self._first_token_at[choice.index] = time.monotonic()
        choice.text_bytes = update.text_bytes_total
        if update.finished:
            del self._unfinished[choice.index]

    def _take_event(self, frame: bytes, source: Source) -> bytes | None:
        """Take a frame that is of no choice. There are a few of them in a stream: they are parsed."""
        response = inference_pb2.GenerateResponse.FromString(frame)
        match response.WhichOneof("event"):
            case "started":
                is_news, self._has_started = not self._has_started, True
                return frame if is_news else None
            case "scheduled":
                return self._take_scheduled(response, source)
            case "prompt_logprobs":
                return self._take_prompt_logprobs(response, frame)
        return frame

    def _take_scheduled(self, response: inference_pb2.GenerateResponse, source: Source) -> bytes | None:
        if self._scheduled is not None:
            return None
        self._scheduled = response.scheduled
        self._scheduled.queue_s += source.opened_at - self._opened_at
        return response.SerializeToString()

    def _take_prompt_logprobs(self, response: inference_pb2.GenerateResponse, frame: bytes) -> bytes | None:
        piece = response.prompt_logprobs
        end = piece.start + len(piece.items)
        num_known = max(0, self._num_prompt_positions - piece.start)
        if num_known >= len(piece.items):
            return None
        self._num_prompt_positions = end
        if num_known == 0:
            return frame
        del piece.items[:num_known]
        piece.start += num_known
        return response.SerializeToString()

    def _of_whole_request(self, frame: bytes, source: Source) -> bytes:
        """Make the numbers in a Finished those of the whole request."""
        response = inference_pb2.GenerateResponse.FromString(frame)
        finished, timing = response.finished, response.finished.timing
        earlier_s = source.opened_at - self._opened_at
        timing.total_s += earlier_s
        timing.migrations += source.num_moves
        first_token_at = self._first_token_at.get(finished.index)
        if first_token_at is not None:
            timing.time_to_first_token_s = first_token_at - self._opened_at
        if self._scheduled is not None:
            timing.queue_s = self._scheduled.queue_s
            finished.usage.cached_tokens = self._scheduled.cached_tokens
        return response.SerializeToString()


def _choices(request: inference_pb2.GenerateRequest) -> Iterable[inference_pb2.ChoiceProgress]:
    if request.HasField("resume"):
        return request.resume.choices
    num_choices = request.sampling.n if request.sampling.HasField("n") else 1
    return (inference_pb2.ChoiceProgress(index=index) for index in range(num_choices))
