"""A gateway process that cannot start, and one that is told to go."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from kvern.services.gateway.settings import GatewaySettings
from kvern.services.runtime.settings import SettingsError
from kvern.v1.inference_pb2 import GenerateRequest, GenerateResponse
from tests.services.processes import running
from tests.services.scraping import scrape, scrape_until, status_address

from .http_client import until_healthy
from .scripted_router import STARTED, ScriptedRouter, delta, finished

COMMAND = [sys.executable, "-m", "kvern.services.gateway", "--log-format", "json", "--router", "unix:/tmp/unused"]


def test_listen_address_in_use_exits_with_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = subprocess.run([*COMMAND, "--listen", address], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert json.loads(line)["event"] == f"listen: cannot bind {address}: Address already in use"


@pytest.mark.parametrize("address", ["unix:/tmp/x.sock", "8000", "127.0.0.1:http", "127.0.0.1:70000"])
def test_listen_address_of_wrong_form_is_refused_by_name(address: str) -> None:
    with pytest.raises(SettingsError, match=f"listen: .*{address} is not host:port"):
        GatewaySettings.load(["--listen", address, "--router", "unix:/x"], prog="gateway", environ={})


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_parser_that_does_not_exist_is_refused_by_name(flag: str) -> None:
    with pytest.raises(SettingsError, match=flag.strip("-").replace("-", "_")):
        GatewaySettings.load(["--listen", "x:1", "--router", "unix:/x", flag, "xml"], prog="gateway", environ={})


async def test_sigterm_mid_stream_lets_it_finish(tmp_path: Path, listen: str) -> None:
    """E13, at the HTTP door: first it is not healthy, and takes no connection only after that."""
    may_finish = asyncio.Event()

    async def behaviour(request: GenerateRequest) -> AsyncIterator[GenerateResponse]:
        yield STARTED
        await may_finish.wait()
        yield delta("whole")
        yield finished()

    router, address, status = ScriptedRouter(), f"unix:{tmp_path}/router.sock", status_address()
    router.behaviour = behaviour
    flags = ("--listen", listen, "--router", address, "--status-listen", status)
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
    async with (
        router.serving(address),
        running("gateway", *flags, log=tmp_path / "log", drain_delay_s=4) as process,
        httpx.AsyncClient(base_url=f"http://{listen}", timeout=20) as client,
    ):
        await until_healthy(client)
        await scrape_until(status, lambda now: now("kvern_ready") == 1)
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            assert "assistant" in await anext(lines)
            process.terminate()
            async with asyncio.timeout(10):
                while (await client.get("/health")).status_code == 200:
                    pass
            await asyncio.sleep(0.3)  # uvicorn acts on its exit flag within 0.1 s, were it set
            unhealthy = await client.get("/health")
            assert (unhealthy.status_code, unhealthy.headers["connection"]) == (503, "close")
            assert (await scrape(status))("kvern_ready") == 0
            may_finish.set()
            rest = [line async for line in lines]
        assert any("whole" in line for line in rest)
        assert "data: [DONE]" in rest
        assert await process.wait() == 0


async def test_request_waits_for_a_router_that_is_started_again(tmp_path: Path, listen: str) -> None:
    address, body = f"unix:{tmp_path}/router.sock", {"messages": [{"role": "user", "content": "Hello"}]}
    async with (
        running("gateway", "--listen", listen, "--router", address, log=tmp_path / "log"),
        httpx.AsyncClient(base_url=f"http://{listen}", timeout=20) as client,
    ):
        async with ScriptedRouter().serving(address):
            await until_healthy(client)
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        for _ in range(10):
            assert (await client.get("/health")).status_code == 503
        async with ScriptedRouter().serving(address):
            answer = await asking
    assert answer.status_code == 200, answer.text
