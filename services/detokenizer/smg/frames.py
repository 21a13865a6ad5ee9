"""What goes to SMG: token ids, and no text. SMG turns them into text itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2

from kvern.services.detokenizer.choice import Choice
from kvern.v1 import inference_pb2

_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_ABORT: "abort",
    inference_pb2.FINISH_REASON_ERROR: "error",
}


class SmgFrames:
    """One Generate call's. Where it does not stream, all is in each choice's last message."""

    is_resumable = False

    def __init__(
        self, prompt: Sequence[int], stop_token_ids: Collection[int], *, streams: bool, tells_prompt: bool
    ) -> None:
        """stop_token_ids: the client's own; of other end tokens SMG hears only that they ended a choice.
        tells_prompt: whether the prompt's log-probabilities were asked for.
        """
        self._prompt = prompt
        self._stop_token_ids = stop_token_ids
        self._streams = streams
        self._cached_tokens = 0
        self._output_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._logprobs: defaultdict[int, vllm_engine_pb2.OutputLogProbs] = defaultdict(vllm_engine_pb2.OutputLogProbs)
        """Of tokens that are not told so far, by choice."""
        self._input_logprobs = _of_first_token(prompt) if tells_prompt else None
        """Until choice 0's first message."""

    def started(self, started: inference_pb2.Started) -> Iterable[vllm_engine_pb2.GenerateResponse]:
        return ()

    def scheduled(self, scheduled: inference_pb2.Scheduled) -> Iterable[vllm_engine_pb2.GenerateResponse]:
        self._cached_tokens = scheduled.cached_tokens
        return ()

    def prompt_logprobs(
        self, start: int, items: Iterable[inference_pb2.TokenLogprobs]
    ) -> Iterable[vllm_engine_pb2.GenerateResponse]:
        told = self._input_logprobs
        assert told is not None
        for item in items:
            told.token_logprobs.add(value=item.sampled.logprob)
            told.token_ids.append(item.sampled.token_id)
            _add_top(told.top_logprobs, item)
        return ()

    def deltas(
        self, choice: Choice, text: str, logprobs: list[inference_pb2.TokenLogprobs]
    ) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        token_ids, choice.unsent_ids = choice.unsent_ids, []
        self._output_ids[choice.index] += token_ids
        for item in logprobs:
            told = self._logprobs[choice.index]
            told.token_logprobs.append(item.sampled.logprob)
            told.token_ids.append(item.sampled.token_id)
            _add_top(told.top_logprobs, item)
        if self._streams and token_ids:
            chunk = vllm_engine_pb2.GenerateStreamChunk(
                # SMG adds the counts of chunks up, as vLLM's own servicer has it.
                token_ids=token_ids, completion_tokens=len(token_ids), index=choice.index
            )  # fmt: skip
            yield vllm_engine_pb2.GenerateResponse(chunk=self._complete(chunk))

    def finished(self, choice: Choice, finished: inference_pb2.Finished) -> Iterable[vllm_engine_pb2.GenerateResponse]:
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=self._output_ids.pop(choice.index, []),
            finish_reason=_REASONS[finished.reason],
            completion_tokens=finished.usage.completion_tokens,
            index=choice.index,
        )
        matched = finished.WhichOneof("matched")
        if matched == "stop":
            complete.matched_stop_str = finished.stop
        elif matched == "stop_token_id" and finished.stop_token_id in self._stop_token_ids:
            complete.matched_token_id = finished.stop_token_id
        return (vllm_engine_pb2.GenerateResponse(complete=self._complete(complete)),)

    def _complete(
        self, message: vllm_engine_pb2.GenerateStreamChunk | vllm_engine_pb2.GenerateComplete
    ) -> vllm_engine_pb2.GenerateStreamChunk | vllm_engine_pb2.GenerateComplete:
        """Set what both kinds of message have, and return it."""
        message.prompt_tokens, message.cached_tokens = len(self._prompt), self._cached_tokens
        if (logprobs := self._logprobs.pop(message.index, None)) is not None:
            message.output_logprobs.CopyFrom(logprobs)
        if message.index == 0 and self._input_logprobs is not None:
            message.input_logprobs.CopyFrom(self._input_logprobs)
            self._input_logprobs = None
        return message


def _of_first_token(prompt: Sequence[int]) -> vllm_engine_pb2.InputLogProbs:
    """Begin a prompt's: nothing comes before its first token that could tell of it."""
    return vllm_engine_pb2.InputLogProbs(
        token_logprobs=[vllm_engine_pb2.InputTokenLogProb()],
        token_ids=prompt[:1],
        top_logprobs=[vllm_engine_pb2.TopLogProbs()],
    )


def _add_top(top_logprobs: Any, item: inference_pb2.TokenLogprobs) -> None:
    top_logprobs.add(values=[each.logprob for each in item.top], token_ids=[each.token_id for each in item.top])
