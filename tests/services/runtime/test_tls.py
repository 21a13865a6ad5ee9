"""TLS of listeners and channels over real sockets, and what happens when its files change."""

from __future__ import annotations

import base64
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from starlette.applications import Starlette
from structlog.testing import capture_logs

from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.http_server import bind, serving
from kvern.services.runtime.peer_identity import certificate_names
from kvern.services.runtime.reloading import UnusableFile
from kvern.services.runtime.server import GrpcServer
from kvern.services.runtime.settings import ServiceSettings, SettingsError
from kvern.services.runtime.status import Status
from kvern.services.runtime.tls import ClientTls, KeyPair, client_tls, server_tls
from tests.services.certificates import Authority, Pair
from tests.up_process import free_port

TIMEOUT_S = 20.0
P_256, PRIME239V3 = bytes.fromhex("2a8648ce3d030107"), bytes.fromhex("2a8648ce3d030106")
"""Names of curves in keys: one that is known here, and one that is not."""
NAME = "replicas.kvern.svc"


@dataclass
class Peers:
    """A server that asks for certificates, and what is needed to call it."""

    authority: Authority
    address: str
    server: Pair
    client: Pair

    def tls(self, pair: Pair | None = None, ca: Path | None = None) -> ClientTls:
        pair = pair or self.client
        return ClientTls(ca or self.authority.file, KeyPair(pair.certificate, pair.key))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def settings_of(pair: Pair, **fields: Any) -> ServiceSettings:
    given = {"listen": (), "drain_delay_s": 0, "drain_timeout_s": 0} | fields
    return ServiceSettings(tls_cert=pair.certificate, tls_key=pair.key, **given)


async def echo(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def tell_names(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    return ",".join(sorted(certificate_names(context))).encode()


HANDLERS: dict[str, Any] = {
    "Echo": grpc.stream_stream_rpc_method_handler(echo),  # type: ignore[arg-type]
    "Names": grpc.unary_unary_rpc_method_handler(tell_names),  # type: ignore[arg-type]
}


@pytest.fixture
async def peers(authority: Authority) -> AsyncIterator[Peers]:
    pair, client = authority.sign("server", NAME), authority.sign("client", "spiffe://kvern/router")
    address = f"127.0.0.1:{free_port()}"
    settings = settings_of(pair, listen=(address,), tls_client_ca=authority.file)
    async with GrpcServer(settings, [], Status("test")) as server:
        server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", HANDLERS),))
        await server.start()
        yield Peers(authority, address, pair, client)


async def names(channel: grpc.aio.Channel) -> set[str]:
    """Return what the server reads in the caller's certificate."""
    told: bytes = await channel.unary_unary("/test/Names")(b"", timeout=TIMEOUT_S)
    return set(told.decode().split(","))


async def assert_refused(channel: grpc.aio.Channel) -> None:
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await names(channel)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_caller_is_known_by_the_names_in_its_certificate(peers: Peers) -> None:
    async with open_channel(peers.address, tls=peers.tls()) as channel:
        assert await names(channel) == {"127.0.0.1", "localhost", "spiffe://kvern/router"}


async def test_caller_without_a_certificate_of_the_authority_is_refused(peers: Peers, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "other").sign("stranger", "spiffe://kvern/router")
    await assert_refused(open_channel(peers.address))
    await assert_refused(open_channel(peers.address, tls=ClientTls(peers.authority.file, None)))
    await assert_refused(open_channel(peers.address, tls=peers.tls(stranger)))


async def test_server_of_another_authority_or_name_is_refused(peers: Peers, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    await assert_refused(open_channel(peers.address, tls=peers.tls(ca=other.file)))
    await assert_refused(open_channel(peers.address, "elsewhere.svc", peers.tls()))
    async with open_channel(peers.address, NAME, peers.tls()) as channel:
        assert await names(channel)


async def test_rotated_server_certificate_serves_new_connections_and_open_streams_go_on(
    peers: Peers, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other")
    async with (
        open_channel(peers.address, tls=peers.tls()) as before,
        open_channel(peers.address, tls=peers.tls(ca=other.file)) as after,
    ):
        stream = before.stream_stream("/test/Echo")()
        await stream.write(b"one")
        assert await stream.read() == b"one"
        peers.server.replace_by(other.sign("rotated"))
        assert await names(after)
        await assert_refused(open_channel(peers.address, tls=peers.tls()))
        await stream.write(b"two")
        assert await stream.read() == b"two"


async def test_rotated_client_certificate_and_authority_serve_new_calls_and_open_streams_go_on(
    peers: Peers, tmp_path: Path
) -> None:
    trusted = tmp_path / "trusted.pem"
    shutil.copy(peers.authority.file, trusted)
    async with open_channel(peers.address, tls=peers.tls(ca=trusted)) as channel:
        method = channel.unary_unary("/test/Names")
        stream = channel.stream_stream("/test/Echo")()
        await stream.write(b"one")
        assert await stream.read() == b"one"
        peers.client.replace_by(peers.authority.sign("rotated", "spiffe://kvern/successor"))
        assert b"successor" in await method(b"", timeout=TIMEOUT_S)
        await stream.write(b"two")
        assert await stream.read() == b"two"
        Authority(tmp_path, "other").file.replace(trusted)
        with pytest.raises(grpc.aio.AioRpcError):
            await method(b"", timeout=TIMEOUT_S)
        await stream.write(b"three")
        assert await stream.read() == b"three"
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def test_broken_new_pair_leaves_the_old_one_serving_and_is_told_once(peers: Peers) -> None:
    with capture_logs() as logs:
        peers.server.key.write_bytes(peers.client.key.read_bytes())
        for _ in range(2):
            async with open_channel(peers.address, tls=peers.tls()) as channel:
                assert await names(channel)
    [error] = [entry["error"] for entry in logs if entry["log_level"] == "error"]
    assert str(peers.server.key) in error


async def test_broken_new_pair_of_a_caller_leaves_the_old_one_in_use(peers: Peers) -> None:
    async with open_channel(peers.address, tls=peers.tls()) as channel:
        peers.client.certificate.write_bytes(b"half a certif")
        assert await names(channel)


async def get(address: str, authority: Authority, client: Pair | None = None) -> int:
    """Return the status of the answer to a new connection."""
    context = ssl.create_default_context(cafile=str(authority.file))
    if client is not None:
        context.load_cert_chain(client.certificate, client.key)
    async with httpx.AsyncClient(verify=context, timeout=TIMEOUT_S) as http:
        return (await http.get(f"https://{address}/healthz")).status_code


async def test_status_port_speaks_tls_asks_nobody_and_serves_a_rotated_certificate(
    authority: Authority, tmp_path: Path
) -> None:
    pair, other, address = authority.sign("server"), Authority(tmp_path, "other"), f"127.0.0.1:{free_port()}"
    async with Status("test").serving(address, server_tls(settings_of(pair, tls_client_ca=authority.file))):
        assert await get(address, authority) == 200
        pair.replace_by(other.sign("rotated"))
        assert await get(address, other) == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await get(address, authority)
        pair.key.write_bytes(b"broken")
        assert await get(address, other) == 200


async def test_http_caller_without_a_certificate_is_refused(authority: Authority) -> None:
    address = f"127.0.0.1:{free_port()}"
    tls = server_tls(settings_of(authority.sign("server"), tls_client_ca=authority.file))
    assert tls is not None
    async with serving(Starlette(), [bind(address)], grace_s=1, tls=tls.ssl_context()):
        assert await get(address, authority, authority.sign("client")) == 404
        with pytest.raises(httpx.HTTPError):
            await get(address, authority)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--tls-cert=c"], "tls_key"),
        (["--tls-key=k"], "tls_key"),
        (["--tls-client-ca=a"], "tls_client_ca"),
    ],
)
def test_settings_that_make_no_sense_alone_are_refused_by_name(flags: list[str], named: str) -> None:
    with pytest.raises(SettingsError, match=f"^{named}: "):
        ServiceSettings.load(["--listen=unix:/s", *flags], prog="test", environ={})


@pytest.mark.parametrize("broken", ["certificate", "key"])
def test_pair_that_cannot_be_used_is_named(authority: Authority, broken: str) -> None:
    pair, other = authority.sign("server"), authority.sign("other")
    file: Path = getattr(pair, broken)
    for content in (b"", b"no PEM", getattr(other, broken).read_bytes()):
        file.write_bytes(content)
        with pytest.raises(UnusableFile, match="server"):
            server_tls(settings_of(pair))
    file.unlink()
    with pytest.raises(UnusableFile, match=f"{file}: No such file"):
        server_tls(settings_of(pair))


@pytest.mark.parametrize(
    ("flag", "exit_code", "said"), [("--tls-key=/away.key", 1, "/away.key: No such file"), ("", 2, "tls_key")]
)
def test_process_with_a_pair_it_cannot_use_ends_with_one_line(
    authority: Authority, flag: str, exit_code: int, said: str
) -> None:
    flags = [f"--tls-cert={authority.sign('server').certificate}", *([flag] if flag else [])]
    command = [sys.executable, "-m", "kvern.services.gateway", "--listen=127.0.0.1:0", "--router=unix:/r", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == exit_code
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_pair_of_a_curve_that_is_not_known_here_is_named(authority: Authority) -> None:
    pair = authority.sign("server")
    _, *lines, _ = pair.key.read_text().splitlines()
    key = base64.encodebytes(base64.b64decode("".join(lines)).replace(P_256, PRIME239V3))
    pair.key.write_bytes(b"-----BEGIN PRIVATE KEY-----\n" + key + b"-----END PRIVATE KEY-----\n")
    with pytest.raises(UnusableFile, match=f"{pair.key}: Curve"):
        server_tls(settings_of(pair))


def test_authority_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnusableFile, match=r"away\.pem"):
        client_tls(ServiceSettings(listen=(), drain_delay_s=0, drain_timeout_s=0, tls_ca=tmp_path / "away.pem"))
