"""A generation on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import click

from kvern.cli.output import print_json, stderr_console
from kvern.client import Delta, Event, Finished, PromptLogprobs, Scheduled, Started
from kvern.v1 import inference_pb2 as pb

_FIELD_OF: dict[type[Event], str] = {
    Started: "started",
    Scheduled: "scheduled",
    PromptLogprobs: "prompt_logprobs",
    Delta: "delta",
    Finished: "finished",
}


class GenerationFailed(click.ClickException):
    """The call went well, but its choice ended in an error."""


def print_answer(events: Iterable[Event], *, as_json: bool = False, stats: bool = False) -> None:
    """Print the text of a generation as it arrives, or its messages. Raises GenerationFailed and KvernError."""
    for event in events:
        if as_json:
            print_json(_response(event))
        elif isinstance(event, Delta):
            print_text(event.text)
        if isinstance(event, Finished):
            if not as_json:
                print_text("\n")
            _conclude(event, stats=stats)


def print_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _response(event: Event) -> pb.GenerateResponse:
    """Return an event as the protocol's message, which says by its field's name what it is."""
    return pb.GenerateResponse(**{_FIELD_OF[type(event)]: event})  # type: ignore[arg-type]


def _conclude(finished: Finished, *, stats: bool) -> None:
    if stats:
        stderr_console().print(_summary(finished), style="dim")
    if finished.reason == pb.FINISH_REASON_ERROR:
        raise GenerationFailed(finished.error)


def _summary(finished: Finished) -> str:
    usage, timing = finished.usage, finished.timing
    per_s = usage.completion_tokens / timing.total_s if timing.total_s else 0.0
    reason = pb.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
    return (
        f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached; "
        f"{usage.completion_tokens} tokens in {timing.total_s:.2f} s, {per_s:.1f} tok/s, "
        f"first after {timing.time_to_first_token_s:.2f} s; ended by {reason}"
    )
