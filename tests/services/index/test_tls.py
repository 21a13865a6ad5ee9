"""`rediss://` to a real server behind a TLS end, as managed Redis has it, and what is read again when it changes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from kvern.services.runtime.redis_index import RedisClient, open_redis
from kvern.services.runtime.reloading import UnusableFile
from tests.services.certificates import Authority, Pair

from .redis_servers import RedisServer


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def tls_end(server: RedisServer, pair: Pair, client_ca: Path | None = None) -> AsyncIterator[int]:
    """Take TLS connections for a server. Yields the port. client_ca: whose certificates callers must show."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            await asyncio.gather(pump(reader, server_writer), pump(server_reader, writer))
        finally:
            writer.close()

    listener = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    async with listener:
        yield int(listener.sockets[0].getsockname()[1])


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def connects_anew(client: RedisClient) -> bool:
    """Whether the server answers on a new connection."""
    assert isinstance(client, redis.asyncio.Redis)
    await client.connection_pool.disconnect()
    try:
        return bool(await client.ping())
    except redis.ConnectionError:
        return False


async def test_rediss_speaks_tls_and_trusts_only_the_authority_it_is_given(
    server: RedisServer, authority: Authority
) -> None:
    async with tls_end(server, authority.sign("redis")) as port:
        async with open_redis(f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority.file}") as trusting:
            assert await trusting.ping()
        async with open_redis(f"rediss://127.0.0.1:{port}") as mistrusting:
            with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                await mistrusting.ping()


async def test_rotated_client_certificate_is_shown_on_new_connections_and_a_broken_one_is_not(
    server: RedisServer, authority: Authority, tmp_path: Path
) -> None:
    own, other = authority.sign("client"), Authority(tmp_path, "other")
    query = f"ssl_ca_certs={authority.file}&ssl_certfile={own.certificate}&ssl_keyfile={own.key}"
    async with (
        tls_end(server, authority.sign("redis"), other.file) as port,
        open_redis(f"rediss://127.0.0.1:{port}?{query}") as client,
    ):
        assert not await connects_anew(client)
        own.replace_by(other.sign("rotated"))
        assert await connects_anew(client)
        own.key.write_bytes(b"broken")
        assert await connects_anew(client)


async def test_rotated_password_is_used_on_new_connections(server: RedisServer, tmp_path: Path) -> None:
    file = tmp_path / "password"
    server.command("ACL", "SETUSER", "mill", "on", ">a first/", "+ping")
    file.write_text("a first/\n")
    async with open_redis(f"redis://mill@127.0.0.1:{server.port}", file) as client:
        assert await connects_anew(client)
        server.command("ACL", "SETUSER", "mill", "resetpass", ">a second")
        assert not await connects_anew(client)
        file.write_text("a second")
        assert await connects_anew(client)
        file.write_text("")
        assert await connects_anew(client)


@pytest.mark.parametrize("scheme", ["rediss", "rediss+sentinel", "rediss+cluster"])
def test_certificate_that_cannot_be_used_is_named_before_anything_is_connected(
    authority: Authority, scheme: str
) -> None:
    own, other = authority.sign("client"), authority.sign("other")
    query = f"ssl_certfile={own.certificate}&ssl_keyfile={other.key}"
    with pytest.raises(UnusableFile, match=str(other.key)):
        open_redis(f"{scheme}://127.0.0.1:1/service?{query}")
