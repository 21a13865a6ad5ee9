"""The engine service around a thread whose step does not end: a real thread, a real server, a device that hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.engine.config import EngineConfig
from kvern.engine.core import Add, EngineCore, Output, Stop
from kvern.engine.errors import EngineStuck
from kvern.engine.plan import Plan
from kvern.engine.runner import ModelRunner
from kvern.engine.startup import Engine
from kvern.engine.summary import Capacity
from kvern.services.engine import engine_thread
from kvern.services.engine.__main__ import main
from kvern.services.engine.engine_thread import EngineThread
from kvern.services.engine.settings import EngineSettings
from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.stall import StallRule
from kvern.services.runtime.status import Status
from tests.engine.checked_runner import CheckedRunner, LazyStep
from tests.engine.test_core import NUM_BLOCKS, make_core, make_request
from tests.up_process import free_port

from .test_engine_service import connect

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

RULE = StallRule(min_s=0.3, unknown_s=0.3, dead_factor=2)

PATIENCE_S = 30.0


class GatedRunner(CheckedRunner):
    """Hangs while its gate is closed."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, 4)
        self.gate = threading.Event()
        self.gate.set()

    def submit(self, plan: Plan) -> LazyStep:
        assert self.gate.wait(PATIENCE_S)
        return super().submit(plan)


def engine_around(core: EngineCore, runner: CheckedRunner) -> Engine:
    capacity = Capacity("", "", 0, 0, "float32", "cpu", 0, 4, NUM_BLOCKS, 64, 4, 16, enable_prefix_caching=True)
    return Engine(core, core._scheduler, cast(ModelRunner, runner), capacity, "c", 50, frozenset())


def load_from(monkeypatch: pytest.MonkeyPatch, runner: GatedRunner, may_load: threading.Event) -> EngineCore:
    """Have engine threads load the returned core, as soon as they may."""
    core = make_core(runner)

    def load(*_: object) -> Engine:
        assert may_load.wait(PATIENCE_S)
        return engine_around(core, runner)

    monkeypatch.setattr(engine_thread, "start_engine", load)
    return core


@dataclass
class Service:
    """A running engine service and what tells of it."""

    runner: GatedRunner
    may_load: threading.Event
    task: asyncio.Task[None]
    http: httpx.AsyncClient
    address: str
    health: health_pb2_grpc.HealthStub

    async def get(self, path: str) -> httpx.Response:
        return await self.http.get(path)

    async def get_until(self, path: str, code: int) -> httpx.Response:
        async with asyncio.timeout(PATIENCE_S):
            while (response := await self.get(path)).status_code != code:
                pass
        return response

    async def health_becomes(self, wanted: int) -> None:
        call = self.health.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S, wait_for_ready=True)
        async for response in call:
            if response.status == wanted:
                break
        call.cancel()


@asynccontextmanager
async def serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: StallRule = RULE, drain_timeout_s: float = 0.1
) -> AsyncIterator[Service]:
    runner, may_load = GatedRunner(), threading.Event()
    core = load_from(monkeypatch, runner, may_load)
    address = f"unix:{tmp_path}/engine.sock"
    flags = [f"--listen={address}", "--drain-delay-s=0", f"--drain-timeout-s={drain_timeout_s}"]
    settings = EngineSettings.load(flags, prog="engine", environ={})
    status, status_address = Status("engine"), f"127.0.0.1:{free_port()}"
    async with (
        status.serving(status_address),
        open_channel(address) as channel,
        httpx.AsyncClient(base_url=f"http://{status_address}", timeout=PATIENCE_S) as http,
    ):
        task = asyncio.create_task(main(settings, status, rule))
        health = health_pb2_grpc.HealthStub(channel)
        try:
            yield Service(runner, may_load, task, http, address, health)
            if not task.done():
                os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_S):
                await task
        finally:
            task.cancel()
            runner.gate.set()
            may_load.set()
            core.send(Stop())
            for thread in threading.enumerate():
                if thread.name == "engine":
                    await asyncio.to_thread(thread.join, PATIENCE_S)


async def test_engine_is_unready_while_a_step_is_stuck_and_dead_when_it_stays_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G02, G03: loading, however long, is neither ready nor trouble; a wedged loop is not ready, and told of."""
    async with serving(tmp_path, monkeypatch) as service:
        await service.health_becomes(NOT_SERVING)
        assert (await service.get("/readyz")).status_code == 503
        assert (await service.get("/healthz")).status_code == 200
        service.may_load.set()
        await service.health_becomes(SERVING)
        assert (await service.get("/readyz")).status_code == 200
        async with connect(service.address) as (connection, _):
            await connection.add(1, [5], 3)
            await connection.read_until_ended(1)
            while connection.load.stalled:  # where the machine was
                await connection.read()
            service.runner.gate.clear()
            await connection.add(2, [6], 3)
            async with asyncio.timeout(PATIENCE_S):
                while not (await connection.read()).load.stalled:
                    pass
            assert connection.load.num_running == 1
            await service.health_becomes(NOT_SERVING)
            assert (await service.get("/readyz")).status_code == 503
            assert "has not ended" in (await service.get_until("/healthz", 503)).text
            assert 'kvern_engine_stalled{model="smollm2"} 1.0' in (await service.get("/metrics")).text
            async with connect(service.address) as (latecomer, _):
                assert (await latecomer.read()).load.stalled

            service.runner.gate.set()
            await connection.read_until_ended(2)
            while connection.load.stalled:
                await connection.read()
            await service.health_becomes(SERVING)
            assert (await service.get("/healthz")).status_code == 200
            assert 'kvern_engine_step_age_seconds{model="smollm2"} 0.0' in (await service.get("/metrics")).text


async def test_drain_of_an_engine_that_is_stuck_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, monkeypatch, replace(RULE, dead_factor=1000)) as service:
        service.may_load.set()
        await service.health_becomes(SERVING)
        async with connect(service.address) as (connection, _):
            service.runner.gate.clear()
            await connection.add(1, [5], 3)
            await service.health_becomes(NOT_SERVING)


async def test_stop_of_an_engine_that_only_a_restart_helps_lets_go_of_its_streams_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wedge_and_stop() -> None:
        async with serving(tmp_path, monkeypatch, drain_timeout_s=10 * PATIENCE_S) as service:
            service.may_load.set()
            await service.health_becomes(SERVING)
            async with connect(service.address) as (connection, _):
                service.runner.gate.clear()
                await connection.add(1, [5], 3)
                await service.get_until("/healthz", 503)
                os.kill(os.getpid(), signal.SIGTERM)
                with suppress(grpc.aio.AioRpcError):
                    while await connection.read():
                        pass

    with pytest.raises(EngineStuck, match="has not ended"):
        await wedge_and_stop()


async def test_thread_that_still_loads_ends_before_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: EngineConfig, progress: Callable[[float, str], None], _: object) -> Engine:
        while True:
            progress(0.5, "loading for ever")

    monkeypatch.setattr(engine_thread, "start_engine", load)
    thread = EngineThread(EngineConfig(Path("none")), lambda _: None)
    thread.start()
    await asyncio.to_thread(thread._end_loading)
    assert not thread._thread.is_alive()
    with pytest.raises(RuntimeError, match="the process ends"):
        await thread.loaded


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


async def test_step_does_not_age_while_the_engine_loads_rests_or_waits_for_its_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, may_load = GatedRunner(), threading.Event()
    core = load_from(monkeypatch, runner, may_load)
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    thread = EngineThread(EngineConfig(Path("none")), outputs.put_nowait)
    thread.start()
    assert (thread.step_age_s, thread.expected_step_s) == (0, 0)
    may_load.set()
    await thread.loaded
    await until(lambda: core.is_idle)
    core.last_step_at -= 3600
    assert thread.step_age_s == 0
    thread.pause()
    core.send(Add(make_request(1, [5], 60)))
    await until(lambda: not core.is_idle)
    core.last_step_at -= 3600
    assert thread.step_age_s == 0
    runner.gate.clear()
    thread.go_on()
    await outputs.get()  # it is scheduled, and its step is stuck
    assert 0 < thread.step_age_s < 3600
    runner.gate.set()
    await thread.stop()
