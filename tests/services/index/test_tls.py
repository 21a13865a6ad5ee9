"""`rediss://` to a real server behind a TLS end, as managed Redis has it."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from kvern.services.runtime.redis_index import open_redis

from .redis_servers import RedisServer


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    openssl = shutil.which("openssl")
    assert openssl is not None, "this test makes its certificate with the openssl command"
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


@asynccontextmanager
async def tls_end(server: RedisServer, certificate: tuple[Path, Path]) -> AsyncIterator[int]:
    """Take TLS connections for a server. Yields the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

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


async def test_rediss_speaks_tls_and_trusts_only_the_certificate_it_is_given(
    server: RedisServer, certificate: tuple[Path, Path]
) -> None:
    async with tls_end(server, certificate) as port:
        async with open_redis(f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate[0]}") as trusting:
            assert await trusting.ping()
        async with open_redis(f"rediss://127.0.0.1:{port}") as mistrusting:
            with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                await mistrusting.ping()
