"""vllm.grpc.engine.VllmEngine: the front door as SMG knows it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from kvern.services.detokenizer.front_door import DRAINING, RETRY_AFTER_S, FrontDoor
from kvern.services.detokenizer.request_log import log_direct
from kvern.services.detokenizer.settings import DetokenizerSettings
from kvern.services.detokenizer.smg.frames import SmgFrames
from kvern.services.detokenizer.smg.kv_events import to_event_batch
from kvern.services.detokenizer.smg.model_files import ModelFiles, read_model_files
from kvern.services.detokenizer.smg.requests import check_gathered, check_rank, to_generate_request, truncate_prompt
from kvern.services.runtime.channel import streaming
from kvern.services.runtime.errors import (
    AlreadyExists,
    Cancelled,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    Unsupported,
)
from kvern.services.runtime.interceptors import end_call
from kvern.services.runtime.model_source import ModelSource
from kvern.services.runtime.text import Tokenizer
from kvern.services.runtime.validate import check_generate
from kvern.v1 import inference_pb2, replica_pb2
from kvern.version import __version__

MAX_SUBSCRIBERS = 16
"""Of KV events, each a stream to the engine."""

MAX_TEXT_BYTES = 2**20
"""Of a prompt that is text: encoding takes a hundred times as much memory."""

MAX_TEXTS = 32
"""Prompts that are encoded, or wait for it."""

CHUNK_BYTES = 2**19
"""Of the archive of files, in one message."""

_Context = grpc.aio.ServicerContext[Any, Any]


class SmgServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # the stubs are untyped
    """Lets SMG in. Whoever reaches it is one tenant, with one cache salt."""

    def __init__(
        self, door: FrontDoor, source: ModelSource, tokenizer: Tokenizer, settings: DetokenizerSettings
    ) -> None:
        self._door = door
        self._source = source
        self._tokenizer = tokenizer
        self._settings = settings
        self._calls: dict[str, asyncio.Task[Any]] = {}
        """Generate calls that run, by request id."""
        self._subscribers: set[asyncio.Task[Any]] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._num_texts = 0
        self._encoding = asyncio.Lock()
        self._reading_files: asyncio.Task[ModelFiles] | None = None
        self._started_at = time.monotonic()
        self._last_receive = 0.0

    def drain(self) -> None:
        """End what would last for ever. Nothing new is taken since the door drains."""
        for subscriber in self._subscribers:
            end_call(subscriber, Unavailable("this replica drains", reason=DRAINING))

    async def wait_until_idle(self) -> None:
        """Wait until no Generate call is left. The door ends them all in time."""
        await self._is_idle.wait()

    async def Generate(
        self, request: vllm_engine_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[vllm_engine_pb2.GenerateResponse]:
        self._last_receive = time.time()
        with log_direct("smg", context.time_remaining) as record:
            record.request_id = request.request_id
            info = self._serving_info()
            record.model = info.model
            with self._claim(request.request_id) as record.request_id:
                generate = to_generate_request(request, info, record.request_id, self._settings.smg_salt)
                check_generate(generate)
                await self._encode_prompt(generate)
                self._serving_info()  # encoding takes a while, and what began after the door's drain nothing would end
                record.prompt_tokens = len(generate.token_ids.ids)
                check_gathered(generate, info.max_model_len, streams=request.stream)
                frames = SmgFrames(
                    generate.token_ids.ids,
                    generate.stopping.stop_token_ids,
                    streams=request.stream,
                    tells_prompt=generate.output.HasField("prompt_logprobs"),
                )
                serve = replica_pb2.ServeRequest(request=generate)
                async with aclosing(self._door.run(serve, frames, context.time_remaining(), record)) as responses:
                    async for response in responses:
                        yield response

    async def Abort(self, request: vllm_engine_pb2.AbortRequest, context: _Context) -> vllm_engine_pb2.AbortResponse:
        for request_id in request.request_ids:
            if (call := self._calls.get(request_id)) is not None:
                end_call(call, Cancelled("aborted"))
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: _Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        state, is_stalled = self._door.state, self._door.engine.load.stalled
        is_healthy = state == replica_pb2.REPLICA_STATE_READY and not is_stalled
        name = replica_pb2.ReplicaState.Name(state).removeprefix("REPLICA_STATE_").lower()
        return vllm_engine_pb2.HealthCheckResponse(healthy=is_healthy, message="stalled" if is_stalled else name)

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: _Context
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        info, files = self._info(), await self._model_files()
        tokenizer = self._tokenizer.transformers
        return vllm_engine_pb2.GetModelInfoResponse(
            # Not where the files lie: gateways ask for them.
            model_path=info.model,
            served_model_name=info.model,
            is_generation=True,
            max_context_length=info.max_model_len,
            max_req_input_len=info.max_model_len - 1,
            vocab_size=info.vocab_size,
            model_type=files.config.get("model_type", ""),
            architectures=files.config.get("architectures") or (),
            eos_token_ids=info.eos_token_ids,
            pad_token_id=tokenizer.pad_token_id or 0,
            bos_token_id=tokenizer.bos_token_id or 0,
        )

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: _Context
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        info = self._info()
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=self._door.num_streams,
            last_receive_timestamp=self._last_receive,
            uptime_seconds=time.monotonic() - self._started_at,
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=info.block_size,
            model_dtype=info.dtype,
            max_num_seqs=info.max_num_seqs,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: _Context
    ) -> vllm_engine_pb2.GetLoadsResponse:
        check_rank("dp_rank", request.dp_rank)
        info, load = self._info(), self._door.load()
        used, total = load.num_used_blocks * info.block_size, info.num_blocks * info.block_size
        told = vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            num_used_tokens=used,
            max_total_num_tokens=total,
            token_usage=used / max(1, total),
            utilization=load.num_running / max(1, info.max_num_seqs),
            max_running_requests=info.max_num_seqs,
            num_waiting_uncached_tokens=load.queued_prefill_tokens,
        )
        now = datetime.now(UTC).isoformat()
        return vllm_engine_pb2.GetLoadsResponse(timestamp=now, version=__version__, dp_rank_count=1, loads=[told])

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: _Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        files = await self._model_files()
        archive = files.archive
        for start in range(0, len(archive), CHUNK_BYTES):
            end = start + CHUNK_BYTES
            sha256 = files.sha256 if end >= len(archive) else ""
            yield common_pb2.GetTokenizerChunk(data=archive[start:end], sha256=sha256)

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: _Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        info = self._serving_info()
        self._check_kv_events()
        with self._subscribe():
            watch = self._door.engine.watch_blocks(request.start_sequence_number, self._settings.smg_salt)
            async with streaming(watch) as told:
                # SMG waits for these before it goes on, and there may be no event for long.
                await context.send_initial_metadata(())
                async for message in told:
                    yield to_event_batch(message, info.block_size)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: _Context
    ) -> common_pb2.FlushCacheResponse:
        raise Unsupported("FlushCache", "the cache is others' too, and this door does not know who asks")

    async def Embed(self, request: vllm_engine_pb2.EmbedRequest, context: _Context) -> vllm_engine_pb2.EmbedResponse:
        raise Unsupported("Embed", "replicas generate; they embed nothing")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: _Context
    ) -> common_pb2.ProfileResponse:
        raise Unsupported("StartProfile", "replicas are not profiled from outside")

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: _Context
    ) -> common_pb2.ProfileResponse:
        raise Unsupported("StopProfile", "replicas are not profiled from outside")

    def _info(self) -> replica_pb2.EngineInfo:
        info = self._door.engine.info
        if info is None:
            raise Unavailable("the engine is away")
        return info

    def _serving_info(self) -> replica_pb2.EngineInfo:
        if self._door.is_draining:
            raise Unavailable("this replica drains", reason=DRAINING)
        return self._info()

    def _check_kv_events(self) -> None:
        if not self._settings.smg_kv_events:
            raise Unsupported("SubscribeKvEvents", "off; the detokenizer needs --smg-kv-events, and so does the engine")
        if not self._door.engine.tells_blocks:
            raise Unsupported("SubscribeKvEvents", "the engine was started without --smg-kv-events")
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            raise ResourceExhausted(f"{MAX_SUBSCRIBERS} subscribe already", retry_after_s=RETRY_AFTER_S)

    @contextmanager
    def _claim(self, request_id: str) -> Iterator[str]:
        """Run one request under its id, or one that is made up, and yield that. Raises AlreadyExists."""
        if request_id in self._calls:
            raise AlreadyExists(f"request_id {request_id[:64]!r} is in flight")
        request_id = request_id or uuid.uuid4().hex
        call = asyncio.current_task()
        assert call is not None
        self._calls[request_id] = call
        self._is_idle.clear()
        try:
            yield request_id
        finally:
            del self._calls[request_id]
            if not self._calls:
                self._is_idle.set()

    @contextmanager
    def _subscribe(self) -> Iterator[None]:
        call = asyncio.current_task()
        assert call is not None
        self._subscribers.add(call)
        try:
            yield
        finally:
            self._subscribers.remove(call)

    async def _encode_prompt(self, generate: inference_pb2.GenerateRequest) -> None:
        """Let the prompt be token ids, cut as the request says."""
        if generate.HasField("text"):
            generate.token_ids.ids.extend(await self._encode(generate.text))
        truncate_prompt(generate)

    async def _encode(self, text: str) -> list[int]:
        if (num_bytes := len(text.encode())) > MAX_TEXT_BYTES:
            raise InvalidArgument("text", f"must be at most {MAX_TEXT_BYTES} bytes, got {num_bytes}; send token ids")
        if self._num_texts >= MAX_TEXTS:
            raise ResourceExhausted(f"{self._num_texts} texts wait to be encoded", retry_after_s=RETRY_AFTER_S)
        self._num_texts += 1
        try:
            await self._encoding.acquire()
        except asyncio.CancelledError:
            self._num_texts -= 1
            raise
        encode = partial(self._tokenizer.encode, text, add_special_tokens=True)
        encoding = asyncio.get_running_loop().run_in_executor(None, encode)
        # The turn belongs to the text: one whose call has gone is encoded to its end.
        encoding.add_done_callback(self._end_encoding)
        return await asyncio.shield(encoding)

    def _end_encoding(self, _: asyncio.Future[list[int]]) -> None:
        self._num_texts -= 1
        self._encoding.release()

    async def _model_files(self) -> ModelFiles:
        """Return the model's files, read once, in a thread."""
        reading = self._reading_files
        if reading is None or (reading.done() and reading.exception() is not None):
            eos_token_ids = self._info().eos_token_ids
            work = asyncio.to_thread(read_model_files, self._source, self._tokenizer, eos_token_ids)
            self._reading_files = reading = asyncio.create_task(work)
        return await asyncio.shield(reading)
