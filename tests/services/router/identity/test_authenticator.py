"""Callers in mutual TLS, known by their certificates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvern.services.router.identity.authenticator import Authenticator
from kvern.services.router.identity.rejection import Rejected
from kvern.services.router.identity.tenants import Tenants
from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.reloaded_file import ReloadedFile
from kvern.services.runtime.server import GrpcServer
from kvern.services.runtime.settings import ServiceSettings
from kvern.services.runtime.status import Status
from kvern.services.runtime.tls import ClientTls, KeyPair
from tests.services.certificates import Authority
from tests.up_process import free_port

METHOD = "/test/Who"

TENANTS = """
tenants: {acme: {}}
certificates:
  - {name: "spiffe://cluster/acme", tenant: acme}
  - {name: acme, tenant: acme, roles: [admin]}
"""


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    """Where a server tells callers who they are."""
    authority, address, tenants = Authority(tmp_path), f"127.0.0.1:{free_port()}", tmp_path / "tenants.yaml"
    tenants.write_text(TENANTS)
    authenticator = Authenticator(tenants=ReloadedFile(tenants, Tenants.parse))

    async def tell(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        try:
            return (await authenticator.identify(context)).id.encode()
        except Rejected as rejected:
            return rejected.cause.value.encode()

    pair = authority.sign("server")
    settings = ServiceSettings(
        listen=(address,),
        tls_cert=pair.certificate,
        tls_key=pair.key,
        tls_client_ca=authority.file,
        drain_delay_s=0,
        drain_timeout_s=0,
    )
    async with GrpcServer(settings, [], Status("test")) as server:
        handler: Any = grpc.unary_unary_rpc_method_handler(tell)  # type: ignore[arg-type]
        server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Who": handler}),))
        await server.start()
        for name in ("acme", "other"):
            authority.sign(name, *(["spiffe://cluster/acme"] if name == "other" else []))
        yield address


@pytest.mark.parametrize(
    ("common_name", "caller"), [("acme", "missing"), ("other", "certificate:spiffe://cluster/acme")]
)
async def test_caller_is_known_by_the_alternative_names_of_its_certificate_alone(
    address: str, tmp_path: Path, common_name: str, caller: str
) -> None:
    """Authorities may leave the common name to who asks for a certificate."""
    pair = KeyPair(tmp_path / f"{common_name}.pem", tmp_path / f"{common_name}.key")
    async with open_channel(address, tls=ClientTls(tmp_path / "authority.pem", pair)) as channel:
        assert await channel.unary_unary(METHOD)(b"", timeout=20) == caller.encode()
