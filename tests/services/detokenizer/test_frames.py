"""Frames beside the limit on a message, and what the router can put together from them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvern.services.detokenizer.choice import Choice
from kvern.services.detokenizer.frames import ServeFrames
from kvern.services.detokenizer.incremental_decode import DecoderFactory
from kvern.services.detokenizer.stop_strings import StopStringMatcher
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import load_tokenizer
from kvern.services.runtime.validate import MAX_LOGPROBS
from kvern.v1.inference_pb2 import Delta, GenerateResponse, PromptLogprobs, TokenLogprob, TokenLogprobs
from kvern.v1.replica_pb2 import ServeResponse

MAX_MESSAGE_BYTES = 2**20
LARGEST_ID = 2**32 - 1


@pytest.fixture
def choice() -> Choice:
    decoder = DecoderFactory(load_tokenizer(find_model("smollm2"))).create(skip_special_tokens=True)
    return Choice(0, decoder, StopStringMatcher((), include_stop=False))


def deltas_of(frames: Iterable[ServeResponse]) -> list[Delta]:
    """Check the size of frames and unwrap them."""
    deltas = []
    for frame in frames:
        assert frame.ByteSize() < MAX_MESSAGE_BYTES
        deltas.append(GenerateResponse.FromString(frame.client_frame).delta)
    return deltas


def logprobs(token_id: int) -> TokenLogprobs:
    """As many alternatives as can be asked for, with long tokens."""
    item = TokenLogprob(token_id=token_id, logprob=-1.0, token=b"x" * 128, rank=1)
    return TokenLogprobs(sampled=item, top=[item] * MAX_LOGPROBS)


def test_what_fits_is_one_frame(choice: Choice) -> None:
    choice.unsent_ids = [1, 2]
    [frame] = ServeFrames(tells_ids=False).deltas(choice, "日", [])
    assert GenerateResponse.FromString(frame.client_frame).delta == Delta(text="日")
    [update] = frame.updates
    assert (list(update.new_token_ids), update.text_bytes_total, choice.unsent_ids) == ([1, 2], 3, [])


def test_text_and_ids_beyond_a_message_are_cut_and_tokens_come_before_their_text(choice: Choice) -> None:
    ids, text = [LARGEST_ID] * 300_000, "日" * 1_000_000
    choice.unsent_ids = ids.copy()
    frames = list(ServeFrames(tells_ids=True).deltas(choice, text, []))
    deltas = deltas_of(frames)
    assert "".join(delta.text for delta in deltas) == text
    assert [id for delta in deltas for id in delta.token_ids] == ids
    assert [id for frame in frames for id in frame.updates[0].new_token_ids] == ids
    assert frames[-1].updates[0].text_bytes_total == len(text.encode())
    first_text = next(position for position, delta in enumerate(deltas) if delta.text)
    assert not any(delta.token_ids for delta in deltas[first_text + 1 :])


def test_log_probabilities_beyond_a_message_are_cut_with_their_tokens(choice: Choice) -> None:
    ids = list(range(500))
    choice.unsent_ids = ids.copy()
    deltas = deltas_of(ServeFrames(tells_ids=True).deltas(choice, "text", [logprobs(id) for id in ids]))
    assert len(deltas) > 1
    for delta in deltas:
        assert [item.sampled.token_id for item in delta.logprobs] == list(delta.token_ids)
    assert [id for delta in deltas for id in delta.token_ids] == ids
    assert [delta.text for delta in deltas] == [*[""] * (len(deltas) - 1), "text"]


def test_prompt_log_probabilities_beyond_a_message_go_on_where_the_last_ended() -> None:
    items = [logprobs(id) for id in range(1, 301)]
    pieces: list[PromptLogprobs] = []
    for frame in ServeFrames(tells_ids=False).prompt_logprobs(1, items):
        assert frame.ByteSize() < MAX_MESSAGE_BYTES
        pieces.append(GenerateResponse.FromString(frame.client_frame).prompt_logprobs)
    assert len(pieces) > 1
    assert [item.sampled.token_id for piece in pieces for item in piece.items] == list(range(1, 301))
    for piece in pieces:
        assert piece.items[0].sampled.token_id == piece.start
