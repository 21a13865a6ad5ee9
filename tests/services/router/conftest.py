from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2_grpc

from kvern.services.runtime.channel import open_channel
from kvern.v1 import inference_pb2_grpc, router_pb2_grpc
from tests.services.processes import running
from tests.services.scraping import status_address

from . import scripted
from .scripted import ScriptedReplica, ScriptedTokenizer
from .setup import MAX_STREAMS, NUM_REPLICAS, SERVING, Setup


@asynccontextmanager
async def starting(folder: Path, *flags: str) -> AsyncIterator[Setup]:
    """Run a router with these flags, and its peers, all of them ready."""
    tokenizer = ScriptedTokenizer(f"unix:{folder}/tokenizer.sock")
    replicas = [ScriptedReplica(f"unix:{folder}/replica-{number}.sock") for number in range(NUM_REPLICAS)]
    address, log, status = f"unix:{folder}/router.sock", folder / "router.log", status_address()
    flags = (*flags, "--listen", address, "--tokenizer", tokenizer.address, "--max-streams", str(MAX_STREAMS))
    flags += ("--replicas", ",".join(replica.address for replica in replicas), "--status-listen", status)
    async with (
        scripted.serving(tokenizer, *replicas),
        running("router", *flags, log=log),
        open_channel(address) as channel,
    ):
        inference = inference_pb2_grpc.InferenceServiceStub(channel)
        router = router_pb2_grpc.RouterServiceStub(channel)
        setup = Setup(tokenizer, replicas, inference, router, health_pb2_grpc.HealthStub(channel), log, status)
        await channel.channel_ready()
        await setup.health_becomes(SERVING)
        await setup.all_ready()
        yield setup


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setup]:
    async with starting(tmp_path_factory.mktemp("router")) as setup:
        yield setup


@pytest_asyncio.fixture(loop_scope="module")
async def setup(started: Setup) -> Setup:
    await started.reset()
    return started
