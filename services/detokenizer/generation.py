"""One request: from what the engine says of it to the messages its reader gets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from kvern.services.detokenizer import logprobs
from kvern.services.detokenizer.choice import Choice
from kvern.services.detokenizer.engine_request import ChoiceNews, EngineRequest, News
from kvern.services.detokenizer.frames import Frames
from kvern.services.detokenizer.incremental_decode import DecoderFactory
from kvern.services.detokenizer.metrics import ABORT, ERROR, ModelMetrics
from kvern.services.detokenizer.replay import after_sent, end_of
from kvern.services.detokenizer.stop_strings import StopStringMatcher
from kvern.services.runtime.errors import InvalidArgument
from kvern.services.runtime.tracing import current_span
from kvern.v1 import engine_pb2, inference_pb2, replica_pb2

_Frame = TypeVar("_Frame")


class Generation(Generic[_Frame]):
    """Turns news of one request into frames. What gathers while a frame is being written becomes the next one."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        info: replica_pb2.EngineInfo,
        decoders: DecoderFactory,
        arrived_at: float,
        metrics: ModelMetrics,
        frames: Frames[_Frame],
    ) -> None:
        self._request = request
        self._metrics = metrics
        self._frames = frames
        self._has_tokens = False
        self._info = info
        self._arrived_at = arrived_at
        self._scheduled_at = arrived_at
        self._cached_tokens = 0
        output = request.output
        self._skips_special = output.skip_special_tokens if output.HasField("skip_special_tokens") else True
        self._tells_tokens = output.token_ids or output.HasField("logprobs")
        self._token_bytes = decoders.token_bytes(skip_special_tokens=self._skips_special)
        self._choices = self._new_choices(decoders)
        self._num_open = len(self._choices)
        """Choices that no Finished was told of."""
        self._ended_before: list[tuple[Choice, engine_pb2.ChoiceEnd | None]] = []
        """Choices that the replay found at their end."""

    @property
    def unfinished(self) -> list[int]:
        """Indices of the choices that are for the engine to generate."""
        return [choice.index for choice in self._choices.values() if not choice.is_finished]

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices so far, those of a stream that is resumed included."""
        return sum(choice.num_tokens for choice in self._choices.values())

    async def replay(self, max_tokens: int) -> list[engine_pb2.ResumedChoice]:
        """Take in what a broken stream had brought, if one is resumed. Return what the engine is to go on from.

        Raises InvalidArgument for bytes of text that the tokens do not have.
        """
        resumed = []
        for position, progress in enumerate(self._request.resume.choices):
            choice = self._choices[progress.index]
            end = end_of(progress.token_ids, self._request, max_tokens, self._info.eos_token_ids)
            text = choice.take_lead() + self._take_tokens(choice, progress.token_ids, end)
            choice.lead = after_sent(text, progress.text_bytes, f"resume.choices[{position}].text_bytes")
            choice.text_bytes = progress.text_bytes
            choice.unsent_ids.clear()
            choice.begins_text &= not any(self._token_bytes[token_id] for token_id in progress.token_ids)
            if choice.is_finished:
                self._ended_before.append((choice, end))
            else:
                resumed.append(engine_pb2.ResumedChoice(index=progress.index, token_ids=progress.token_ids))
            await asyncio.sleep(0)  # others come in between
        return resumed

    @contextmanager
    def counting_ends(self) -> Iterator[None]:
        """Count the choices that the block leaves without a Finished: aborted if cancelled, failed if it fails."""
        reason = ABORT
        try:
            yield
        except Exception:
            reason = ERROR
            raise
        finally:
            self._metrics.count_ends(reason, self._num_open)

    async def frames(self, engine_request: EngineRequest | None) -> AsyncIterator[_Frame]:
        """Yield Started at once, the rest as news comes. Raises Unavailable, InvalidArgument if the engine refuses.

        engine_request: None where nothing is left to be generated.
        """
        for frame in self._begin():
            yield frame
        while engine_request is not None and self._num_open > 0:
            news = await engine_request.next_news()
            for frame in self._take(news, engine_request):
                yield frame

    def _begin(self) -> Iterator[_Frame]:
        yield from self._frames.started(self._started())
        for choice, end in self._ended_before:
            if choice.lead:
                yield from self._deltas(choice, choice.take_lead(), [])
            yield from self._finish(choice, end)

    def _new_choices(self, decoders: DecoderFactory) -> dict[int, Choice]:
        request, stopping = self._request, self._request.stopping
        decoder, lead = decoders.create(skip_special_tokens=self._skips_special), ""
        if request.output.echo:
            # An output's text goes on from its prompt's: a space or a character may begin there.
            lead = decoder.push(request.token_ids.ids)
        marks = decoders.special_tokens.mark(stopping.stop if self._skips_special else ())
        return {
            index: Choice(
                index,
                decoder.copy(),
                StopStringMatcher(stopping.stop, include_stop=stopping.include_stop, marks=marks),
                min_tokens=stopping.min_tokens,
                lead=lead,
                begins_text=not lead,
            )
            for index in self._indices()
        }

    def _indices(self) -> Sequence[int]:
        if self._request.HasField("resume"):
            return [choice.index for choice in self._request.resume.choices]
        sampling = self._request.sampling
        return range(sampling.n if sampling.HasField("n") else 1)

    def _take(self, news: News, engine_request: EngineRequest) -> Iterator[_Frame]:
        if news.cached_tokens is not None:
            yield from self._frames.scheduled(self._scheduled(news.cached_tokens, news.scheduled_at))
        prompt = self._request.token_ids.ids
        for told in news.prompt_logprobs:
            items = logprobs.of_prompt(prompt, told, self._token_bytes)
            yield from self._frames.prompt_logprobs(told.start, items)
        for index, choice_news in sorted(news.choices.items()):
            choice = self._choices[index]
            if not choice.is_finished:
                yield from self._advance(choice, choice_news, engine_request)

    def _advance(self, choice: Choice, news: ChoiceNews, engine_request: EngineRequest) -> Iterator[_Frame]:
        end = news.end
        if end is not None and end.HasField("refusal"):
            raise InvalidArgument(end.refusal.field or "request", end.refusal.message)
        if choice.first_token_at is None and news.token_ids:
            choice.first_token_at = news.came_at
            if not self._has_tokens:
                self._has_tokens = True
                current_span().add_event("first_token")
                self._metrics.first_token.observe(news.came_at - self._arrived_at)
        num_tokens = choice.num_tokens
        text = choice.take_lead() + self._take_tokens(choice, news.token_ids, end)
        self._metrics.tokens.inc(choice.num_tokens - num_tokens)
        if choice.matched_stop is not None and end is None:
            engine_request.abort_choice(choice.index)
        told: list[inference_pb2.TokenLogprobs] = []
        if news.logprobs:
            counted = news.token_ids[: choice.num_tokens - num_tokens]
            told = logprobs.of_choice(choice, counted, news.logprobs, self._token_bytes)
        if text or (self._tells_tokens and choice.unsent_ids):
            yield from self._deltas(choice, text, told)
        if choice.is_finished:
            yield from self._finish(choice, end)

    def _take_tokens(self, choice: Choice, token_ids: Sequence[int], end: engine_pb2.ChoiceEnd | None) -> str:
        """Take tokens, the choice's last ones where `end` is given, and return the text that can be shown."""
        if end is not None and token_ids and self._hides_stop_token(end):
            text = choice.push(token_ids[:-1]) + choice.push_hidden(token_ids[-1])
        else:
            text = choice.push(token_ids)
        choice.is_finished = end is not None or choice.matched_stop is not None
        return text + choice.finish() if choice.is_finished else text

    def _hides_stop_token(self, end: engine_pb2.ChoiceEnd) -> bool:
        return end.HasField("stop_token_id") and not self._request.stopping.include_stop

    def _started(self) -> inference_pb2.Started:
        return inference_pb2.Started(
            request_id=self._request.request_id,
            model=self._info.model,
            prompt_tokens=len(self._request.token_ids.ids),
            seed=self._request.sampling.seed,
        )

    def _scheduled(self, cached_tokens: int, scheduled_at: float) -> inference_pb2.Scheduled:
        self._cached_tokens = cached_tokens
        self._scheduled_at = scheduled_at
        return inference_pb2.Scheduled(cached_tokens=cached_tokens, queue_s=scheduled_at - self._arrived_at)

    def _deltas(self, choice: Choice, text: str, told: list[inference_pb2.TokenLogprobs]) -> Iterator[_Frame]:
        sent = choice.text_bytes
        yield from self._frames.deltas(choice, text, told)
        self._metrics.text_bytes.inc(choice.text_bytes - sent)

    def _finish(self, choice: Choice, end: engine_pb2.ChoiceEnd | None) -> Iterator[_Frame]:
        finished = self._finished(choice, end)
        self._num_open -= 1
        self._metrics.count_finished(finished.reason)
        yield from self._frames.finished(choice, finished)

    def _finished(self, choice: Choice, end: engine_pb2.ChoiceEnd | None) -> inference_pb2.Finished:
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
            finished.reason, finished.error, finished.error_reason = end.reason, end.error, end.error_reason
            if end.HasField("stop_token_id"):
                finished.stop_token_id = end.stop_token_id
        return finished

    def _timing(self, choice: Choice, end: engine_pb2.ChoiceEnd | None) -> inference_pb2.Timing:
        first_token_at = choice.first_token_at
        return inference_pb2.Timing(
            queue_s=self._scheduled_at - self._arrived_at,
            time_to_first_token_s=0.0 if first_token_at is None else first_token_at - self._arrived_at,
            total_s=time.monotonic() - self._arrived_at,
            preemptions=0 if end is None else end.preemptions,
        )
