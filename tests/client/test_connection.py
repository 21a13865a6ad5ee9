"""How the client connects: all servers of a name, new ones, silence, size, TLS."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from kvern.client import AsyncClient, Client, Delta, Finished, RetryPolicy, Unreachable, channel
from kvern.services.runtime.channel import MIN_PING_INTERVAL_S, SERVER_OPTIONS
from tests.up_process import PATIENCE_S, free_port, wait_until

from .conftest import Serve
from .dns_server import DnsServer
from .proxy import Proxy
from .scripted_server import ScriptedServer, delta, finished, responds, started

ANSWER = responds(started(), delta("Hi", 1), finished())


def _server_options(name: str, value: int) -> list[tuple[str, int | str]]:
    """Return the options of our servers, but for one."""
    options = dict(SERVER_OPTIONS)
    assert name in options
    return list((options | {name: value}).items())


def _all_are_used(client: Client, servers: Sequence[ScriptedServer]) -> bool:
    list(client.generate("Hi"))
    return all(server.received for server in servers)


def test_calls_of_one_client_use_all_servers_of_a_name(serve: Serve) -> None:
    """E10."""
    servers = [serve(ANSWER) for _ in range(3)]
    with Client("ipv4:" + ",".join(server.address for server in servers)) as client:
        wait_until(lambda: _all_are_used(client, servers), "connected to all three")
        before = [len(server.received) for server in servers]
        for _ in range(300):
            list(client.generate("Hi"))
    assert [len(server.received) - count for server, count in zip(servers, before, strict=True)] == [100] * 3


async def test_calls_of_one_async_client_use_all_servers_of_a_name(serve: Serve) -> None:
    """E10."""
    servers = [serve(ANSWER) for _ in range(3)]
    async with (
        AsyncClient("ipv4:" + ",".join(server.address for server in servers)) as client,
        asyncio.timeout(PATIENCE_S),  # for the slowest connection
    ):
        while not all(server.received for server in servers):
            assert [event async for event in client.generate("Hi")]


@pytest.mark.timeout(25)
def test_servers_that_a_name_gets_later_are_used(serve: Serve) -> None:
    """E11. A client asks for a name's addresses anew when a connection ends, and servers end each after a time.

    Left to itself gRPC would ask again after 30 s at the earliest.
    """
    port = free_port()
    options = _server_options("grpc.max_connection_age_ms", 500)
    first = serve(ANSWER, address=f"127.0.0.1:{port}", options=options)
    with DnsServer("127.0.0.1") as dns, Client(f"dns://{dns.authority}/kvern.test:{port}") as client:
        assert _all_are_used(client, [first])
        others = [serve(ANSWER, address=f"127.0.0.{host}:{port}", options=options) for host in (2, 3)]
        dns.addresses += ["127.0.0.2", "127.0.0.3"]
        wait_until(lambda: _all_are_used(client, others), "the new servers are used")


def test_long_silence_before_the_first_token_is_survived(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """E08, thirty times as fast. Pings go on all the while, and the server does not take them for an attack."""
    monkeypatch.setattr(channel, "KEEPALIVE_S", channel.KEEPALIVE_S / 30)
    wires: list[Proxy] = []

    def compute_long(ended: threading.Event):
        yield started()
        assert wires[0].pings.wait_for(4)
        yield from (delta("Hi", 1), finished())

    options = _server_options("grpc.http2.min_ping_interval_without_data_ms", round(MIN_PING_INTERVAL_S * 1000 / 30))
    server = serve(compute_long, options=options)
    with Proxy(server.address) as wire, Client(wire.address) as client:
        wires.append(wire)
        assert isinstance(list(client.generate("Hi"))[-1], Finished)
    assert len(server.received) == 1


def test_prompt_of_5_megabytes_is_sent(serve: Serve) -> None:
    """E09."""
    server = serve(ANSWER)
    with Client(server.address) as client:
        list(client.generate("mill " * 1_000_000))
        list(client.generate(range(2_000_000)))
    assert len(server.received[0].text) == 5_000_000
    assert len(server.received[1].token_ids.ids) == 2_000_000


async def test_metadata_goes_with_every_call(serve: Serve) -> None:
    server = serve(ANSWER)
    metadata = [("authorization", "Bearer secret")]
    with Client(server.address, metadata=metadata) as client:
        list(client.generate("Hi"))
        assert server.metadata["authorization"] == "Bearer secret"
        server.metadata = {}
        client.tokenize("Hi")
        assert server.metadata["authorization"] == "Bearer secret"
    server.metadata = {}
    async with AsyncClient(server.address, metadata=metadata) as aio_client:
        assert (await aio_client.tokenize("Hi")).ids
    assert server.metadata["authorization"] == "Bearer secret"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Key and certificate for `localhost`, signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    _make_certificate(key, certificate)
    return key.read_bytes(), certificate.read_bytes()


def _make_certificate(key: Path, certificate: Path) -> None:
    openssl = shutil.which("openssl")
    assert openssl is not None, "this test makes its certificate with the openssl command"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)


async def test_tls_server_is_spoken_to_where_its_certificate_is_trusted(
    serve: Serve, certificate: tuple[bytes, bytes]
) -> None:
    server = serve(ANSWER, address="localhost:0", credentials=grpc.ssl_server_credentials([certificate]))
    trusted = grpc.ssl_channel_credentials(certificate[1])
    with Client(server.address, credentials=trusted) as client:
        assert [event.text for event in client.generate("Hi") if isinstance(event, Delta)] == ["Hi"]
    async with AsyncClient(server.address, credentials=trusted) as aio_client:
        assert isinstance([event async for event in aio_client.generate("Hi")][-1], Finished)


async def test_server_is_known_by_the_name_that_it_is_called_by(serve: Serve, certificate: tuple[bytes, bytes]) -> None:
    server = serve(ANSWER, address="127.0.0.1:0", credentials=grpc.ssl_server_credentials([certificate]))
    trusted = grpc.ssl_channel_credentials(certificate[1])
    by_address = Client(server.address, credentials=trusted, retry=RetryPolicy(max_retries=0))
    with by_address, pytest.raises(Unreachable):
        list(by_address.generate("Hi"))
    with Client(server.address, credentials=trusted, authority="localhost") as client:
        assert isinstance(list(client.generate("Hi"))[-1], Finished)
    async with AsyncClient(server.address, credentials=trusted, authority="localhost") as aio_client:
        assert isinstance([event async for event in aio_client.generate("Hi")][-1], Finished)


def test_tls_server_of_unknown_certificate_is_not_spoken_to(serve: Serve, certificate: tuple[bytes, bytes]) -> None:
    server = serve(ANSWER, address="localhost:0", credentials=grpc.ssl_server_credentials([certificate]))
    untrusting = grpc.ssl_channel_credentials()
    client = Client(server.address, credentials=untrusting, retry=RetryPolicy(max_retries=0))
    with client, pytest.raises(Unreachable):
        list(client.generate("Hi"))
    assert server.received == []
