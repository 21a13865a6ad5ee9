"""One Serve call: from what the engine says of a request to the frames its client gets."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

from kvern.services.detokenizer.choice import Choice
from kvern.services.detokenizer.engine_client import EngineRequest, News
from kvern.services.detokenizer.incremental_decode import DecoderFactory
from kvern.services.detokenizer.stop_strings import StopStringMatcher
from kvern.services.runtime.errors import InvalidArgument
from kvern.v1 import engine_pb2, inference_pb2, replica_pb2


class Generation:
    """Turns news of one request into frames. What gathers while a frame is being written becomes the next one."""

    def __init__(
        self, request: inference_pb2.GenerateRequest, model: str, decoders: DecoderFactory, arrived_at: float
    ) -> None:
        self._request = request
        self._model = model
        self._arrived_at = arrived_at
        self._scheduled_at = arrived_at
        self._cached_tokens = 0
        output = request.output
        self._skips_special = output.skip_special_tokens if output.HasField("skip_special_tokens") else True
        self._choices = [self._new_choice(index, decoders) for index in range(self.num_choices)]

    @property
    def num_choices(self) -> int:
        sampling = self._request.sampling
        return sampling.n if sampling.HasField("n") else 1

    async def frames(self, engine_request: EngineRequest) -> AsyncIterator[replica_pb2.ServeResponse]:
        """Yield Started at once, the rest as news comes. Raises Unavailable, InvalidArgument if the engine refuses."""
        yield self._started()
        while not all(choice.is_finished for choice in self._choices):
            news = await engine_request.next_news()
            for frame in self._take(news):
                yield frame
            self._abort_stopped(news, engine_request)

    def _abort_stopped(self, news: News, engine_request: EngineRequest) -> None:
        """Have the engine drop the choices whose text has come to a stop string."""
        for index in news.token_ids.keys() - news.ended.keys():
            choice = self._choices[index]
            if choice.matched_stop is not None and not choice.is_aborted:
                choice.is_aborted = True
                engine_request.abort_choice(index)

    def _new_choice(self, index: int, decoders: DecoderFactory) -> Choice:
        stopping = self._request.stopping
        return Choice(
            index,
            decoders.create(skip_special_tokens=self._skips_special),
            StopStringMatcher(stopping.stop, include_stop=stopping.include_stop),
            min_tokens=stopping.min_tokens,
        )

    def _take(self, news: News) -> Iterator[replica_pb2.ServeResponse]:
        if news.cached_tokens is not None:
            yield self._scheduled(news.cached_tokens, news.scheduled_at)
        for index in sorted(news.token_ids.keys() | news.ended.keys()):
            choice = self._choices[index]
            if not choice.is_finished:
                yield from self._advance(choice, news)

    def _advance(self, choice: Choice, news: News) -> Iterator[replica_pb2.ServeResponse]:
        token_ids = news.token_ids.get(choice.index, [])
        end = news.ended.get(choice.index)
        if end is not None and end.HasField("refusal"):
            raise InvalidArgument(end.refusal.field or "request", end.refusal.message)
        if choice.first_token_at is None:
            choice.first_token_at = news.tokens_at.get(choice.index)
        text = self._text_of(choice, token_ids, end)
        choice.is_finished = end is not None or choice.matched_stop is not None
        if choice.is_finished:
            text += choice.finish()
        if text or (self._request.output.token_ids and choice.unsent_ids):
            yield self._delta(choice, text)
        if choice.is_finished:
            yield self._finished(choice, end)

    def _text_of(self, choice: Choice, token_ids: list[int], end: engine_pb2.ChoiceEnd | None) -> str:
        hides_stop_token = (
            end is not None
            and end.HasField("stop_token_id")
            and self._skips_special
            and not self._request.stopping.include_stop
        )
        if not (hides_stop_token and token_ids):
            return choice.push(token_ids)
        text = choice.push(token_ids[:-1])
        choice.push_hidden(token_ids[-1])
        return text

    def _started(self) -> replica_pb2.ServeResponse:
        started = inference_pb2.Started(
            request_id=self._request.request_id,
            model=self._model,
            prompt_tokens=len(self._request.token_ids.ids),
            seed=self._request.sampling.seed,
        )
        return _frame(inference_pb2.GenerateResponse(started=started))

    def _scheduled(self, cached_tokens: int, scheduled_at: float) -> replica_pb2.ServeResponse:
        self._cached_tokens = cached_tokens
        self._scheduled_at = scheduled_at
        scheduled = inference_pb2.Scheduled(cached_tokens=cached_tokens, queue_s=scheduled_at - self._arrived_at)
        return _frame(inference_pb2.GenerateResponse(scheduled=scheduled))

    def _delta(self, choice: Choice, text: str) -> replica_pb2.ServeResponse:
        choice.text_bytes += len(text.encode())
        delta = inference_pb2.Delta(index=choice.index, text=text)
        if self._request.output.token_ids:
            delta.token_ids.extend(choice.unsent_ids)
        return _frame(inference_pb2.GenerateResponse(delta=delta), choice)

    def _finished(self, choice: Choice, end: engine_pb2.ChoiceEnd | None) -> replica_pb2.ServeResponse:
        finished = inference_pb2.Finished(
            index=choice.index,
            usage=inference_pb2.Usage(
                prompt_tokens=len(self._request.token_ids.ids),
                cached_tokens=self._cached_tokens,
                completion_tokens=choice.num_tokens,
            ),
            timing=self._timing(choice, end),
        )
        if choice.matched_stop is not None:
            finished.reason, finished.stop = inference_pb2.FINISH_REASON_STOP, choice.matched_stop
        elif end is not None:
            finished.reason, finished.error = end.reason, end.error
            if end.HasField("stop_token_id"):
                finished.stop_token_id = end.stop_token_id
        return _frame(inference_pb2.GenerateResponse(finished=finished), choice)

    def _timing(self, choice: Choice, end: engine_pb2.ChoiceEnd | None) -> inference_pb2.Timing:
        first_token_at = choice.first_token_at
        return inference_pb2.Timing(
            queue_s=self._scheduled_at - self._arrived_at,
            time_to_first_token_s=0.0 if first_token_at is None else first_token_at - self._arrived_at,
            total_s=time.monotonic() - self._arrived_at,
            preemptions=0 if end is None else end.preemptions,
        )


def _frame(event: inference_pb2.GenerateResponse, choice: Choice | None = None) -> replica_pb2.ServeResponse:
    """Serialize what the client gets and, for a choice's event, add what the router remembers of it."""
    frame = replica_pb2.ServeResponse(client_frame=event.SerializeToString())
    if choice is not None:
        frame.updates.add(
            index=choice.index,
            new_token_ids=choice.unsent_ids,
            text_bytes_total=choice.text_bytes,
            finished=event.HasField("finished"),
        )
        choice.unsent_ids.clear()
    return frame
