"""A router that knows its callers, and callers of several kinds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.services.router.identity.api_keys import hash_of
from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.health import WHOLE_FLEET
from kvern.v1 import inference_pb2_grpc, router_pb2_grpc
from tests.services.processes import running
from tests.services.scraping import status_address

from . import scripted
from .identity.issuer import AUDIENCE, ISSUER, Issuer
from .scripted import MODEL, ScriptedReplica, ScriptedTokenizer

Metadata = Sequence[tuple[str, str]]

KEY_OF_THE_FLEET = "0123456789abcdef"
"""Fingerprint of its digest key."""

TENANTS = f"""
unknown_tenants: default
tenants:
  acme: {{}}
  other: {{}}
  operators: {{}}
  late: {{priority_cap: 5}}
  elsewhere: {{models: [another]}}
  single: {{models: [{MODEL}], max_concurrent: 1}}
  frugal: {{tokens_per_minute: 60}}
  resumer: {{tokens_per_minute: 60}}
  dispatch: {{tokens_per_minute: 60}}
"""

KEYS = ("acme", "other", "late", "elsewhere", "single", "frugal", "resumer")
"""Tenants that have a key, called `key of TENANT`."""


def bearer(credentials: str) -> Metadata:
    return (("authorization", f"Bearer {credentials}"),)


def key_of(tenant: str) -> Metadata:
    return bearer(f"key of {tenant}")


ADMIN = bearer("key of an admin")
ADMIN_WITH_LIMITS = bearer("key of another admin")


def keys_file(*entries: str) -> str:
    """Return a file of keys: users' of each tenant, two admins', one that is out of date, and further entries."""
    lines = [f"- {{id: {tenant}-1, tenant: {tenant}, sha256: {hash_of(f'key of {tenant}')}}}" for tenant in KEYS]
    lines.append(f"- {{id: ops, tenant: operators, roles: [admin], sha256: {hash_of('key of an admin')}}}")
    lines.append(f"- {{id: dispatch, tenant: dispatch, roles: [admin], sha256: {hash_of('key of another admin')}}}")
    old = f"id: old, tenant: acme, expires_at: 2020-01-01T00:00:00Z, sha256: {hash_of('an old key')}"
    return "keys:\n" + "\n".join([*lines, f"- {{{old}}}", *entries])


@dataclass
class Guarded:
    """A router that knows its callers, and its peers."""

    tokenizer: ScriptedTokenizer
    replicas: list[ScriptedReplica]
    issuer: Issuer
    keys: Path
    log: Path
    status: str
    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.inference: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(
            self.channel
        )
        self.router: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(self.channel)

    async def becomes(self, wanted: int, service: str = "") -> None:
        """Wait until the router's health says so."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=20, wait_for_ready=True)
        while (await call.read()).status != wanted:
            pass
        call.cancel()

    async def logged(self, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a line of the router's log."""
        async with asyncio.timeout(20):
            while True:
                lines = map(json.loads, self.log.read_text().splitlines())
                if (found := next(filter(is_wanted, lines), None)) is not None:
                    return found
                await asyncio.sleep(0.02)


@asynccontextmanager
async def guarding(folder: Path, issuer: Issuer) -> AsyncIterator[Guarded]:
    """Run a router with keys, tokens and tenants, and its peers."""
    tokenizer = ScriptedTokenizer(f"unix:{folder}/tokenizer.sock")
    replicas = [ScriptedReplica(f"unix:{folder}/replica-{number}.sock") for number in range(2)]
    for peer in (tokenizer, *replicas):
        peer.digest_key = KEY_OF_THE_FLEET
    names = ("keys.yaml", "tenants.yaml", "secret", "ticket-keys", "log")
    keys, tenants, secret, ticket_keys, log = (folder / name for name in names)
    keys.write_text(keys_file())
    tenants.write_text(TENANTS)
    secret.write_text("s" * 32)
    ticket_keys.write_text("t" * 32)
    address, status = f"unix:{folder}/router.sock", status_address()
    flags = [f"--listen={address}", f"--tokenizer={tokenizer.address}", f"--status-listen={status}"]
    flags += [f"--replicas={','.join(replica.address for replica in replicas)}", f"--api-keys={keys}"]
    flags += [f"--tenants={tenants}", f"--salt-secret-file={secret}", f"--jwt-issuer={ISSUER}"]
    flags += [f"--jwt-audience={AUDIENCE}", f"--jwt-jwks={issuer.url}", f"--ticket-key-file={ticket_keys}"]
    async with (
        scripted.serving(tokenizer, *replicas),
        running("router", *flags, log=log),
        open_channel(address) as channel,
    ):
        guarded = Guarded(tokenizer, replicas, issuer, keys, log, status, channel)
        await guarded.becomes(health_pb2.HealthCheckResponse.SERVING, WHOLE_FLEET)
        yield guarded
