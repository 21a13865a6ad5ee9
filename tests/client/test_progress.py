"""Whatever breaks a stream and however often: what its caller gets is what an unbroken stream gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvern.client.progress import Event, Progress
from kvern.v1 import inference_pb2 as pb

SEED = 5


@dataclass(frozen=True)
class ChoiceScript:
    """What a model gives for one choice: a piece of text for each token id."""

    pieces: Sequence[str]
    num_held_back: int
    """The text of so many tokens comes late, as where a stop string may have begun."""

    def deltas(self, progress: pb.ChoiceProgress) -> Iterator[tuple[str, int]]:
        """Yield text and token id of what follows on a progress."""
        text = "".join(self.pieces).encode()
        assert list(progress.token_ids) == list(range(len(progress.token_ids)))
        sent = progress.text_bytes
        for token_id in range(len(progress.token_ids), len(self.pieces)):
            num_shown = max(0, token_id + 1 - self.num_held_back)
            end = max(sent, len("".join(self.pieces[:num_shown]).encode()))
            yield text[sent:end].decode(), token_id
            sent = end
        yield text[sent:].decode(), -1


def serve(scripts: Sequence[ChoiceScript], request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
    """Answer as the contract says, the choices in turn."""
    assert request.output.token_ids
    progress = {index: pb.ChoiceProgress(index=index) for index in range(len(scripts))}
    if request.HasField("resume"):
        assert request.resume.seed == SEED
        progress = {choice.index: choice for choice in request.resume.choices}
    yield pb.GenerateResponse(started=pb.Started(seed=SEED))
    yield pb.GenerateResponse(scheduled=pb.Scheduled())
    streams = {index: scripts[index].deltas(choice) for index, choice in progress.items()}
    while streams:
        for index, stream in list(streams.items()):
            text, token_id = next(stream)
            token_ids = [] if token_id < 0 else [token_id]
            if text or token_ids:
                yield pb.GenerateResponse(delta=pb.Delta(index=index, text=text, token_ids=token_ids))
            if token_id < 0:
                del streams[index]
                yield pb.GenerateResponse(finished=pb.Finished(index=index))


def receive(scripts: Sequence[ChoiceScript], cuts: Sequence[int], *, token_ids: bool) -> list[Event]:
    """Run a generation whose calls break after so many messages each; the last one goes to its end."""
    request = pb.GenerateRequest(sampling=pb.Sampling(n=len(scripts)), output=pb.Output(token_ids=token_ids))
    progress = Progress(request)
    events: list[Event] = []
    for num_messages in [*cuts, 10**6]:
        if progress.is_finished:
            break
        stream = serve(scripts, progress.begin_call())
        for response, _ in zip(stream, range(num_messages), strict=False):
            event = progress.take(response, now=0.0)
            events += [] if event is None else [event]
    assert progress.is_finished
    return events


texts = st.sampled_from(["", "a", "ď", "日本", "\U0001f469\u200d\U0001f467", "the "])
scripts = st.builds(ChoiceScript, st.lists(texts, max_size=8), st.integers(0, 3))


@given(st.lists(scripts, min_size=1, max_size=3), st.lists(st.integers(0, 12), max_size=6), st.booleans())
def test_broken_stream_brings_what_an_unbroken_one_brings(
    choices: list[ChoiceScript], cuts: list[int], token_ids: bool
) -> None:
    events = receive(choices, cuts, token_ids=token_ids)
    assert [type(event) for event in events[:2]] == [pb.Started, pb.Scheduled]
    answer = [event for event in events[2:] if isinstance(event, pb.Delta | pb.Finished)]
    assert answer == events[2:]
    for index, script in enumerate(choices):
        own = [event for event in answer if event.index == index]
        deltas = [event for event in own if isinstance(event, pb.Delta)]
        assert "".join(delta.text for delta in deltas) == "".join(script.pieces)
        ids = [token_id for delta in deltas for token_id in delta.token_ids]
        assert ids == (list(range(len(script.pieces))) if token_ids else [])
        assert own[len(deltas) :] == [pb.Finished(index=index)]


def test_event_of_a_later_protocol_is_passed_over() -> None:
    assert Progress(pb.GenerateRequest()).take(pb.GenerateResponse(), now=0.0) is None
