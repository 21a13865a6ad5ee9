"""One request through the detokenizer's own parts, without processes: what an engine would say in, frames out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from kvern.services.detokenizer.engine_request import EngineRequest
from kvern.services.detokenizer.frames import ServeFrames
from kvern.services.detokenizer.generation import Generation
from kvern.services.detokenizer.incremental_decode import DecoderFactory
from kvern.services.detokenizer.metrics import DetokenizerMetrics
from kvern.services.detokenizer.turns import Turns
from kvern.services.runtime.slow_reader import ReaderWatch
from kvern.v1 import engine_pb2, inference_pb2, replica_pb2

from .scripted_engine import EOS, INFO

METRICS = DetokenizerMetrics(CollectorRegistry()).of(INFO.model)


@dataclass
class Output:
    """What the engine would give one choice, from its first token on."""

    token_ids: Sequence[int]
    end: engine_pb2.ChoiceEnd


@dataclass
class Received:
    """What a client and its router make of frames, one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    text_bytes: int = 0
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    finished: inference_pb2.Finished | None = None


class Driver:
    """Runs requests against the outputs of one engine."""

    def __init__(self, decoders: DecoderFactory, outputs: Mapping[int, Output], tokens_a_step: int = 1) -> None:
        self._decoders = decoders
        self._outputs = outputs
        self._tokens_a_step = tokens_a_step
        self._aborted: set[int] = set()

    async def run(self, request: inference_pb2.GenerateRequest) -> list[replica_pb2.ServeResponse]:
        """Return all frames of a request. An engine is asked only where there is something to generate."""
        frames = ServeFrames(tells_ids=request.output.token_ids)
        generation = Generation(request, INFO, self._decoders, 0.0, METRICS, frames)
        resumed = await generation.replay(request.stopping.max_tokens)
        positions = dict.fromkeys(generation.unfinished, 0)
        positions |= {each.index: len(each.token_ids) for each in resumed}
        with ReaderWatch(600) as reader:
            engine = EngineRequest(1, positions, self._hear, reader, Turns(), lambda: None) if positions else None
            reading = asyncio.create_task(_read(generation, engine))
            while positions and engine is not None:
                self._step(engine, positions, told=request.output.HasField("logprobs"))
                for _ in range(4):
                    await asyncio.sleep(0)  # the writer takes it
            return await reading

    def _hear(self, command: engine_pb2.ConnectRequest) -> None:
        if command.HasField("abort"):
            self._aborted.add(command.abort.choice)

    def _step(self, engine: EngineRequest, positions: dict[int, int], *, told: bool) -> None:
        for index, start in list(positions.items()):
            output = self._outputs[index]
            end = min(start + self._tokens_a_step, len(output.token_ids))
            if index in self._aborted:
                del positions[index]
                continue
            if end > start:
                logprobs = [logprobs_at(position) for position in range(start, end)] if told else ()
                engine.add_tokens(index, list(output.token_ids[start:end]), logprobs, 0.0)
            positions[index] = end
            if end == len(output.token_ids):
                del positions[index]
                engine.end_choice(output.end, 0.0)


def ended(index: int, ids: Sequence[int], max_tokens: int, stop_token_ids: Sequence[int] = ()) -> Output:
    """Cut tokens where an engine would end."""
    for position, token_id in enumerate(ids[:max_tokens]):
        if token_id == EOS or token_id in stop_token_ids:
            end = engine_pb2.ChoiceEnd(index=index, reason=inference_pb2.FINISH_REASON_STOP, stop_token_id=token_id)
            return Output(ids[: position + 1], end)
    return Output(ids[:max_tokens], engine_pb2.ChoiceEnd(index=index, reason=inference_pb2.FINISH_REASON_LENGTH))


def logprobs_at(position: int) -> engine_pb2.EngineTokenLogprobs:
    return engine_pb2.EngineTokenLogprobs(logprob=-position, rank=1, top_ids=[position], top_logprobs=[-1.0])


async def _read(
    generation: Generation[replica_pb2.ServeResponse], engine: EngineRequest | None
) -> list[replica_pb2.ServeResponse]:
    return [frame async for frame in generation.frames(engine)]


def received(frames: Sequence[replica_pb2.ServeResponse]) -> dict[int, Received]:
    """Put together what frames say, by choice."""
    choices: dict[int, Received] = {}
    for frame in frames:
        event = inference_pb2.GenerateResponse.FromString(frame.client_frame)
        for update in frame.updates:
            choice = choices.setdefault(update.index, Received())
            choice.token_ids += update.new_token_ids
            choice.text_bytes = update.text_bytes_total
            choice.text += event.delta.text
            choice.logprobs += event.delta.logprobs
            if update.finished:
                choice.finished = event.finished
    return choices
