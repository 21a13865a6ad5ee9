"""What a door writes of a generation. What goes to the router: the client's events, serialized, with what the router
remembers of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from kvern.services.detokenizer.choice import Choice
from kvern.v1 import inference_pb2, replica_pb2

MAX_COLUMN_BYTES = 200_000
"""Of a frame's text, of its token ids, which it may hold twice, and of its log-probabilities: a message of them all
stays under 1 MiB."""

_MAX_CHARS = MAX_COLUMN_BYTES // 4
_MAX_IDS = MAX_COLUMN_BYTES // 5

_Piece = tuple[list[int], list[inference_pb2.TokenLogprobs], str]

_Frame_co = TypeVar("_Frame_co", covariant=True)


class Frames(Protocol[_Frame_co]):
    """Makes messages of one protocol of what there is to tell of one generation, in order. Of some of it there may be
    nothing to write."""

    @property
    def is_resumable(self) -> bool:
        """Whether whoever reads them goes on elsewhere with a stream that breaks off."""
        ...

    def started(self, started: inference_pb2.Started) -> Iterable[_Frame_co]: ...

    def scheduled(self, scheduled: inference_pb2.Scheduled) -> Iterable[_Frame_co]: ...

    def prompt_logprobs(self, start: int, items: Iterable[inference_pb2.TokenLogprobs]) -> Iterable[_Frame_co]:
        """Tell of a prompt's tokens from position `start` on."""
        ...

    def deltas(self, choice: Choice, text: str, logprobs: list[inference_pb2.TokenLogprobs]) -> Iterable[_Frame_co]:
        """Tell a choice's unsent tokens, with their log-probabilities if there are any, and text."""
        ...

    def finished(self, choice: Choice, finished: inference_pb2.Finished) -> Iterable[_Frame_co]: ...


class ServeFrames:
    """ReplicaService's."""

    is_resumable = True

    def __init__(self, *, tells_ids: bool) -> None:
        """tells_ids: whether the client wants token ids; the router always gets them."""
        self._tells_ids = tells_ids

    def started(self, started: inference_pb2.Started) -> Iterable[replica_pb2.ServeResponse]:
        return (_event_frame(inference_pb2.GenerateResponse(started=started)),)

    def scheduled(self, scheduled: inference_pb2.Scheduled) -> Iterable[replica_pb2.ServeResponse]:
        frame = _event_frame(inference_pb2.GenerateResponse(scheduled=scheduled))
        frame.cached_tokens = scheduled.cached_tokens
        return (frame,)

    def prompt_logprobs(
        self, start: int, items: Iterable[inference_pb2.TokenLogprobs]
    ) -> Iterator[replica_pb2.ServeResponse]:
        piece, num_bytes = inference_pb2.PromptLogprobs(start=start), 0
        for item in items:
            item_bytes = item.ByteSize()
            if piece.items and num_bytes + item_bytes > MAX_COLUMN_BYTES:
                yield _event_frame(inference_pb2.GenerateResponse(prompt_logprobs=piece))
                piece, num_bytes = inference_pb2.PromptLogprobs(start=piece.start + len(piece.items)), 0
            piece.items.append(item)
            num_bytes += item_bytes
        yield _event_frame(inference_pb2.GenerateResponse(prompt_logprobs=piece))

    def deltas(
        self, choice: Choice, text: str, logprobs: list[inference_pb2.TokenLogprobs]
    ) -> Iterator[replica_pb2.ServeResponse]:
        token_ids, choice.unsent_ids = choice.unsent_ids, []
        if not logprobs and len(token_ids) <= _MAX_IDS and len(text) <= _MAX_CHARS:
            yield _delta_frame(choice, token_ids, logprobs, text, self._tells_ids)
            return
        for ids, told, shown in _cut(token_ids, logprobs, text):
            yield _delta_frame(choice, ids, told, shown, self._tells_ids)

    def finished(self, choice: Choice, finished: inference_pb2.Finished) -> Iterable[replica_pb2.ServeResponse]:
        frame = _event_frame(inference_pb2.GenerateResponse(finished=finished))
        frame.updates.add(
            index=choice.index, new_token_ids=choice.unsent_ids, text_bytes_total=choice.text_bytes, finished=True
        )
        choice.unsent_ids = []
        return (frame,)


def _event_frame(event: inference_pb2.GenerateResponse) -> replica_pb2.ServeResponse:
    return replica_pb2.ServeResponse(client_frame=event.SerializeToString())


def _delta_frame(
    choice: Choice, token_ids: list[int], logprobs: list[inference_pb2.TokenLogprobs], text: str, tells_ids: bool
) -> replica_pb2.ServeResponse:
    # One for each message of each stream. Built in place, which takes half the time of passing parts to constructors.
    choice.text_bytes += len(text.encode())
    event = inference_pb2.GenerateResponse()
    event.delta.index, event.delta.text = choice.index, text
    if tells_ids:
        event.delta.token_ids.extend(token_ids)
    event.delta.logprobs.extend(logprobs)
    frame = replica_pb2.ServeResponse()
    frame.client_frame = event.SerializeToString()
    update = frame.updates.add()
    update.index, update.text_bytes_total = choice.index, choice.text_bytes
    update.new_token_ids.extend(token_ids)
    return frame


def _cut(token_ids: list[int], logprobs: list[inference_pb2.TokenLogprobs], text: str) -> Iterator[_Piece]:
    """Cut into pieces that fit a message. Text never comes before its tokens: a broken stream is resumed from these."""
    *groups, last = _cut_tokens(token_ids, logprobs)
    for group in groups:
        yield *group, ""
    yield *last, text[:_MAX_CHARS]
    for start in range(_MAX_CHARS, len(text), _MAX_CHARS):
        yield [], [], text[start : start + _MAX_CHARS]


def _cut_tokens(
    token_ids: list[int], logprobs: list[inference_pb2.TokenLogprobs]
) -> Iterator[tuple[list[int], list[inference_pb2.TokenLogprobs]]]:
    start = num_bytes = 0
    for position in range(len(token_ids)):
        token_bytes = logprobs[position].ByteSize() if logprobs else 5
        if num_bytes + token_bytes > MAX_COLUMN_BYTES and position > start:
            yield token_ids[start:position], logprobs[start:position]
            start, num_bytes = position, 0
        num_bytes += token_bytes
    yield token_ids[start:], logprobs[start:]
