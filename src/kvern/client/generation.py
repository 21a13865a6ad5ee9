"""One generation, over as many calls as it takes."""

from __future__ import annotations

import time

import grpc

from kvern.client.errors import KvernError, TimedOut, first_token_timed_out
from kvern.client.progress import Event, Progress
from kvern.client.retry import Retries, RetryPolicy, TimeLimit, may_pass
from kvern.v1 import inference_pb2 as pb

_MAX_BARREN_STREAMS = 2
"""Streams in a row that began and broke without a new token. The request itself may be what kills its server."""


class Generation:
    """Decides what to ask for, what to pass on, when to call again and when to give up.

    Both clients drive it: until it is finished they make a call with `begin_call`, hand each response to `take`, and
    say how the call ended, with `end_call` or `delay_after`.

    A request without an id gets a fresh one from the server in each call; its caller sees the first. An id that the
    caller chose is kept. It may then be in flight still, of the call that broke: ALREADY_EXISTS is waited out, but for
    the first call.
    """

    def __init__(
        self,
        request: pb.GenerateRequest,
        policy: RetryPolicy,
        timeout_s: float | None = None,
        first_token_timeout_s: float | None = None,
    ) -> None:
        self._progress = Progress(request)
        self._policy = policy
        self._retries = Retries(policy)
        self._limit = TimeLimit(timeout_s)
        self._first_token_limit = TimeLimit(first_token_timeout_s)
        self._num_calls = 0
        self._num_barren_streams = 0

    @property
    def is_finished(self) -> bool:
        return self._progress.is_finished

    @property
    def has_answer(self) -> bool:
        """Whether the call in progress brought anything."""
        return self._progress.call_has_started

    @property
    def timeout_s(self) -> float | None:
        return self._limit.timeout_s

    @property
    def left_s(self) -> float | None:
        """Time left in all, in seconds."""
        return self._limit.left_s

    @property
    def first_token_left_s(self) -> float | None:
        """Time left until the first token, in seconds; None where no limit is, or it is kept."""
        return None if self._progress.has_output else self._first_token_limit.left_s

    def first_token_timed_out(self) -> TimedOut:
        return first_token_timed_out(self._first_token_limit.timeout_s or 0.0)

    def begin_call(self) -> pb.GenerateRequest:
        """Return what the next call has to ask for."""
        self._num_calls += 1
        return self._progress.begin_call()

    def take(self, response: pb.GenerateResponse) -> Event | None:
        """Return what is new to the caller in a response, None if nothing is."""
        return self._progress.take(response, time.monotonic())

    def end_call(self) -> None:
        """Accept the OK end of a call. Raises KvernError if something is missing."""
        if not self.is_finished:
            raise KvernError(grpc.StatusCode.INTERNAL, "the stream ended before every choice had finished")

    def delay_after(self, error: KvernError) -> float:
        """Return how long to wait before the next call, in seconds. Raises the error if there shall be none."""
        if self.is_finished:
            return 0.0  # it broke behind its last message
        if not self._may_pass(error):
            raise error
        if self._progress.call_has_output:
            self._retries.reset()
            self._num_barren_streams = 0
        elif self._progress.call_has_started:
            self._num_barren_streams += 1
        if self._num_barren_streams == _MAX_BARREN_STREAMS:
            raise error
        if self._progress.has_output:
            return self._retries.delay_after(error, self._policy.max_resumptions, self._limit)
        return self._retries.delay_after(error, self._policy.max_retries, self._limit, self._first_token_limit)

    def _may_pass(self, error: KvernError) -> bool:
        if self._progress.call_has_started:
            return error.code is grpc.StatusCode.UNAVAILABLE
        is_own_id = error.code is grpc.StatusCode.ALREADY_EXISTS and self._num_calls > 1
        return may_pass(error) or is_own_id
