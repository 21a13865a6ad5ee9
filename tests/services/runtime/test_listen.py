from __future__ import annotations

import asyncio
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.services.runtime.channel import SERVER_OPTIONS, open_channel
from kvern.services.runtime.listen import MAX_SOCKET_PATH_BYTES, ListenError, bind, share_with_group, socket_path


@pytest.fixture
async def server():
    server = grpc.aio.server(options=SERVER_OPTIONS)
    yield server
    await server.stop(0)


@pytest.mark.parametrize(
    ("address", "path"), [("unix:/a/b.sock", Path("/a/b.sock")), ("127.0.0.1:50051", None), ("unixy:1", None)]
)
def test_socket_path_is_that_of_unix_addresses_only(address: str, path: Path | None) -> None:
    assert socket_path(address) == path


async def test_second_server_on_one_path_is_refused_until_the_first_has_gone(
    server: grpc.aio.Server, tmp_path: Path
) -> None:
    """E15: and whatever a dead server left behind is in nobody's way."""
    address = f"unix:{tmp_path}/s.sock"
    lock = bind(server, address)
    assert lock is not None
    with pytest.raises(ListenError, match=r"another process serves .*s\.sock"):
        bind(grpc.aio.server(), address)
    lock.close()
    second = bind(grpc.aio.server(), address)
    assert second is not None
    second.close()


async def test_path_too_long_for_a_socket_is_refused_with_both_lengths(server: grpc.aio.Server, tmp_path: Path) -> None:
    """E17."""
    path = tmp_path / ("x" * 120)
    with pytest.raises(ListenError, match=f"{len(str(path))} bytes, at most {MAX_SOCKET_PATH_BYTES}"):
        bind(server, f"unix:{path}")
    assert not path.exists()


async def test_path_of_the_greatest_length_works(tmp_path: Path, server: grpc.aio.Server) -> None:
    path = tmp_path / ("x" * (MAX_SOCKET_PATH_BYTES - len(str(tmp_path)) - 1))
    assert len(str(path)) == MAX_SOCKET_PATH_BYTES
    lock = bind(server, f"unix:{path}")
    assert lock is not None
    await server.start()
    assert path.is_socket()
    lock.close()


async def test_folder_that_is_not_there_is_named(server: grpc.aio.Server, tmp_path: Path) -> None:
    with pytest.raises(ListenError, match=r"no such folder: .*nowhere"):
        bind(server, f"unix:{tmp_path}/nowhere/s.sock")


async def test_port_taken_or_address_of_another_machine_is_refused(server: grpc.aio.Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ListenError, match=address):
            bind(server, address)
    with pytest.raises(ListenError, match=r"192\.0\.2\.1"):
        bind(server, "192.0.2.1:50051")


async def test_socket_can_be_used_by_the_group(server: grpc.aio.Server, tmp_path: Path) -> None:
    """E16."""
    address = f"unix:{tmp_path}/s.sock"
    lock = bind(server, address)
    assert lock is not None
    await server.start()
    share_with_group(address)
    assert stat.S_IMODE((tmp_path / "s.sock").stat().st_mode) == 0o660
    lock.close()


async def run_router(address: str) -> asyncio.subprocess.Process:
    """Start a service that needs nothing to listen."""
    flags = ["--listen", address, "--tokenizer", "unix:/nowhere", "--replicas", "unix:/nowhere", "--drain-delay-s", "0"]
    command = [sys.executable, "-m", "kvern.services.router", *flags]
    return await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)


async def check_answers(address: str) -> None:
    async with open_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True)


@pytest.mark.parametrize("end", [asyncio.subprocess.Process.terminate, asyncio.subprocess.Process.kill])
async def test_service_started_twice_on_one_socket_leaves_the_first_serving_and_can_replace_it(
    tmp_path: Path, end: Callable[[asyncio.subprocess.Process], None]
) -> None:
    """E15."""
    address = f"unix:{tmp_path}/t.sock"
    first = await run_router(address)
    await check_answers(address)
    second = await run_router(address)
    _, log = await second.communicate()
    assert second.returncode == 1
    assert b"another process serves" in log
    assert b"Traceback" not in log
    await check_answers(address)
    end(first)
    await first.wait()
    third = await run_router(address)
    await check_answers(address)
    third.terminate()
    assert await third.wait() == 0
