"""`python -m kvern.services.engine`: one engine process."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import structlog

from kvern.engine.block_hash import key_fingerprint
from kvern.engine.core import Output
from kvern.engine.errors import EngineError, EngineStuck
from kvern.engine.startup import Engine
from kvern.services.engine.announcer import Announcer, announcing
from kvern.services.engine.block_log import BlockLog
from kvern.services.engine.engine_thread import EngineThread
from kvern.services.engine.grammars import Grammars
from kvern.services.engine.index_writer import StaleEpoch
from kvern.services.engine.metrics import EngineMetrics
from kvern.services.engine.servicer import EngineServicer, ServedEngine
from kvern.services.engine.settings import EngineSettings
from kvern.services.engine.stall_watch import StallWatch, watching
from kvern.services.engine.vllm_metrics import VllmMetrics
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.process import run_service
from kvern.services.runtime.server import GrpcServer
from kvern.services.runtime.settings import SettingsError
from kvern.services.runtime.stall import STALL_RULE, StallRule
from kvern.services.runtime.status import Status
from kvern.v1 import engine_pb2_grpc, replica_pb2

_log = structlog.get_logger("kvern.engine")


def new_epoch() -> int:
    """Return the start time in ms and 16 random bits: the later start has the greater epoch."""
    return (time.time_ns() // 1_000_000) << 16 | random.getrandbits(16)


def starting_info(settings: EngineSettings, model: str) -> replica_pb2.EngineInfo:
    """Return what is known of the engine before it is loaded."""
    return replica_pb2.EngineInfo(epoch=new_epoch(), model=model, block_size=settings.block_size)


def engine_info(engine: Engine, starting: replica_pb2.EngineInfo, digest_key: bytes) -> replica_pb2.EngineInfo:
    capacity = engine.capacity
    return replica_pb2.EngineInfo(
        epoch=starting.epoch,
        model=starting.model,
        contract=engine.contract,
        block_size=capacity.block_size,
        num_blocks=capacity.num_blocks,
        max_model_len=capacity.max_model_len,
        max_num_seqs=capacity.max_num_seqs,
        vocab_size=engine.vocab_size,
        eos_token_ids=sorted(engine.eos_token_ids),
        kv_bytes=capacity.kv_bytes,
        weight_bytes=capacity.weight_bytes,
        dtype=capacity.dtype,
        device=capacity.device,
        digest_key=key_fingerprint(digest_key),
    )


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def main(settings: EngineSettings, status: Status, stall_rule: StallRule = STALL_RULE) -> None:
    source = find_model(settings.model)
    config = settings.engine_config(source.path)
    starting = starting_info(settings, settings.served_model_name or source.name)
    announcer = Announcer(settings, starting)
    metrics = EngineMetrics(status.registry, starting.model, announcer.writer)
    if settings.vllm_metrics:
        VllmMetrics(status.registry, metrics, settings)
    async with (
        announcing(announcer) as announcement,
        GrpcServer(settings, ["kvern.v1.EngineService"], status) as server,
    ):
        blocks = None
        if settings.smg_kv_events:
            blocks = BlockLog(starting.epoch, settings.block_size, settings.smg_salt)
        servicer = EngineServicer(settings.seed, metrics.requests, status.tracer, blocks)
        engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server.grpc)
        await server.start()

        def on_output(output: Output) -> None:
            announcer.on_output(output)
            metrics.on_output(output)
            servicer.on_output(output)

        def on_stall(is_stuck: bool) -> None:
            server.set_ready(not is_stuck)
            servicer.tell_stalled(is_stuck)

        thread = EngineThread(config, on_output)
        watch = StallWatch(thread, on_stall, stall_rule)
        status.find_trouble = watch.find_trouble
        thread.start()
        stop = asyncio.create_task(server.wait_for_stop())
        await _first_of(thread.loaded, announcement, stop)
        if announcement.done():
            announcement.result()  # raises why nothing more may be announced
        if not thread.loaded.done():
            return
        engine = thread.loaded.result()
        for line in engine.capacity.lines():
            _log.info(line)
        info = engine_info(engine, starting, config.digest_key)
        grammars = Grammars(source, engine)
        servicer.start_serving(ServedEngine(thread, info, grammars))
        announcer.start_serving(thread, info)
        metrics.start_serving(thread, watch, info)
        server.set_ready(True)
        async with watching(watch):
            await _first_of(thread.ended, announcement, stop)
        if trouble := watch.find_trouble():
            raise EngineStuck(trouble)  # a drain would keep streams here that can go on elsewhere
        for ended in (thread.ended, announcement):
            if ended.done():
                ended.result()  # raises what the engine died of, or why it must
        announcer.start_draining()
    await grammars.close()
    if not watch.is_stuck:  # or it would never end, and the process with it
        await thread.stop()


if __name__ == "__main__":
    run_service("engine", EngineSettings, main, expected_errors=(EngineError, StaleEpoch, SettingsError))
