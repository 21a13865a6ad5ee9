"""A replica that is called by routers, by clients with tickets, and by neither."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvern.services.detokenizer.callers import Callers
from kvern.services.detokenizer.settings import DetokenizerSettings
from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.settings import SettingsError
from kvern.services.runtime.ticket import CLOCK_SKEW_S, METADATA_KEY, Ticket, TicketKeys, sign
from kvern.services.runtime.tls import ClientTls, KeyPair
from kvern.v1 import engine_pb2, inference_pb2, inference_pb2_grpc, replica_pb2, replica_pb2_grpc
from tests.services.certificates import Authority
from tests.up_process import free_port

from .scripted_engine import INFO, ScriptedEngine
from .setup import SERVING, TIMEOUT_S, Setup, details_of, detokenizing, finished_of, text_of

KEY = b"k" * 32
PROMPT = inference_pb2.TokenIds(ids=[5, 6, 7])

BEYOND_VOCABULARY = replica_pb2.ServeRequest(
    request=inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[INFO.vocab_size]))
)
"""Refused by who would serve it."""

Call = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


class Caller:
    """Calls a replica from one place, as one caller."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.inference: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        self.replica: replica_pb2_grpc.ReplicaServiceAsyncStub = replica_pb2_grpc.ReplicaServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.reflection = reflection_pb2_grpc.ServerReflectionStub(channel)

    def generate(self, ticket: bytes | None = None, **fields: Any) -> Call:
        metadata = () if ticket is None else ((METADATA_KEY, base64.b64encode(ticket).decode()),)
        request = inference_pb2.GenerateRequest(**({"token_ids": PROMPT} | fields))
        return self.inference.Generate(request, timeout=TIMEOUT_S, metadata=metadata)

    async def is_let_in(self) -> bool:
        """Whether it may call what is the routers'; health is told in any case."""
        await self.health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        verdicts = [
            await _verdict(self.replica.GetReplicaInfo(replica_pb2.GetReplicaInfoRequest(), timeout=TIMEOUT_S)),
            await _verdict(self.replica.Serve(BEYOND_VOCABULARY, timeout=TIMEOUT_S).read()),
        ]
        assert len(set(verdicts)) == 1
        return verdicts[0]

    def reflect(self) -> Any:
        return self.reflection.ServerReflectionInfo(timeout=TIMEOUT_S)


async def _verdict(answer: Any) -> bool:
    try:
        await answer
    except grpc.aio.AioRpcError as error:
        return error.code() is not grpc.StatusCode.PERMISSION_DENIED
    return True


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status and reason that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await (call.read() if hasattr(call, "read") else call)
    return raised.value.code(), details_of(raised.value)[0]


@dataclass
class Guarded:
    """A replica that asks who calls, its engine, and callers."""

    setup: Setup
    keys: Path
    pod: Caller
    router: Caller
    other_router: Caller
    client: Caller

    async def begun(self, call: Call) -> engine_pb2.AddRequest:
        """Read a call up to Started, and return the request as it came to the engine."""
        assert (await call.read()).HasField("started")
        async with asyncio.timeout(TIMEOUT_S):
            return await self.setup.engine.added.get()

    async def cancel(self, call: Call) -> None:
        call.cancel()
        await self.setup.aborted()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    authority, address, keys = Authority(folder), f"127.0.0.1:{free_port()}", folder / "keys"
    keys.write_bytes(KEY)
    flags = ("--listen", address, *authority.sign("server").flags, f"--tls-client-ca={authority.file}")
    flags += ("--router-identities=spiffe://kvern/router,*.routers.svc", f"--ticket-key-file={keys}")
    async with AsyncExitStack() as stack:
        engine = ScriptedEngine()
        engine.says_hello.set()
        setup = await stack.enter_async_context(detokenizing(engine, folder, *flags))
        await setup.health_becomes(SERVING)

        async def caller(name: str) -> Caller:
            pair = authority.sign(name.replace("/", "-"), name)
            tls = ClientTls(authority.file, KeyPair(pair.certificate, pair.key))
            return Caller(await stack.enter_async_context(open_channel(address, tls=tls)))

        pod = Caller(await stack.enter_async_context(open_channel(f"unix:{folder}/detokenizer.sock")))
        routers = await caller("spiffe://kvern/router"), await caller("one.routers.svc")
        yield Guarded(setup, keys, pod, *routers, await caller("routers.svc"))


def ticket(key: bytes = KEY, **fields: Any) -> bytes:
    given = {"tenant": "mill", "salt": "grain", "model": INFO.model, "priority_cap": 2}
    return sign(key, Ticket(**({"expires_at": time.time() + 60} | given | fields)))


@pytest.mark.asyncio(loop_scope="module")
async def test_routers_and_the_pod_itself_are_let_in_and_nobody_else(guarded: Guarded) -> None:
    for caller, is_let_in in (
        (guarded.pod, True),
        (guarded.router, True),
        (guarded.other_router, True),
        (guarded.client, False),
    ):
        assert await caller.is_let_in() is is_let_in
    assert await refusal(guarded.client.reflect()) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
    told = guarded.router.reflect()
    await told.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    assert len((await told.read()).list_services_response.service) == 4
    told.cancel()


@pytest.mark.asyncio(loop_scope="module")
async def test_client_without_a_good_ticket_is_refused_by_reason(guarded: Guarded) -> None:
    expired = ticket(expires_at=time.time() - CLOCK_SKEW_S - 1)
    for shown, reason in (
        (None, "UNAUTHENTICATED"),
        (expired, "TICKET_EXPIRED"),
        (ticket(b"f" * 32), "TICKET_INVALID"),
        (ticket(model="another"), "TICKET_INVALID"),
        (b"", "TICKET_INVALID"),
    ):
        refused = await refusal(guarded.client.generate(shown))
        assert refused == (grpc.StatusCode.UNAUTHENTICATED, reason)
    unticketed = guarded.client.inference.ListModels(inference_pb2.ListModelsRequest(), timeout=TIMEOUT_S)
    assert await refusal(unticketed) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert guarded.setup.engine.added.empty()


@pytest.mark.asyncio(loop_scope="module")
async def test_client_with_a_ticket_is_served_with_its_salt_and_priority(guarded: Guarded) -> None:
    cache = inference_pb2.Cache(salt="another's")
    stopping = inference_pb2.Stopping(max_tokens=2)
    call = guarded.client.generate(ticket(), request_id="one\nline", cache=cache, priority=-5, stopping=stopping)
    add = await guarded.begun(call)
    assert (add.cache.salt, add.priority, list(add.prompt_token_ids)) == ("grain", 2, [5, 6, 7])
    assert add.sampling.HasField("seed")
    ids = guarded.setup.ids("Hello there")[:2]
    guarded.setup.engine.step([add.id], ids, num_tokens=[len(ids)])
    guarded.setup.engine.end(add.id)
    events = [event async for event in _rest(call)]
    assert text_of(events) == "Hello there"
    assert finished_of(events).usage.completion_tokens == 2
    line = await guarded.setup.logged(event="request ended", request_id="one?line")
    assert (line["door"], line["tenant"], line["model"], line["status"]) == ("direct", "mill", INFO.model, "OK")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (3, 2)


async def _rest(call: Call) -> AsyncIterator[inference_pb2.GenerateResponse]:
    while isinstance(event := await call.read(), inference_pb2.GenerateResponse):
        yield event


@pytest.mark.asyncio(loop_scope="module")
async def test_less_urgent_request_than_its_ticket_allows_stays_so(guarded: Guarded) -> None:
    call = guarded.client.generate(ticket(), priority=9)
    assert (await guarded.begun(call)).priority == 9
    await guarded.cancel(call)


@pytest.mark.asyncio(loop_scope="module")
async def test_pod_and_router_need_no_ticket_and_are_believed(guarded: Guarded) -> None:
    for caller in (guarded.pod, guarded.router):
        call = caller.generate(cache=inference_pb2.Cache(salt="their own"), keep_last_tokens=2)
        add = await guarded.begun(call)
        assert (add.cache.salt, list(add.prompt_token_ids)) == ("their own", [6, 7])
        await guarded.cancel(call)


@pytest.mark.asyncio(loop_scope="module")
async def test_request_id_in_flight_is_refused(guarded: Guarded) -> None:
    """C27, of clients that call a replica themselves."""
    for _ in range(2):
        call = guarded.client.generate(ticket(), request_id="mine")
        await guarded.begun(call)
        twin = await refusal(guarded.client.generate(ticket(), request_id="mine"))
        assert twin == (grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS")
        await guarded.cancel(call)


@pytest.mark.asyncio(loop_scope="module")
async def test_request_id_of_another_tenant_is_free(guarded: Guarded) -> None:
    mine, others = (guarded.client.generate(ticket(tenant=name), request_id="same") for name in ("mill", "other"))
    for call in (mine, others):
        await guarded.begun(call)
    for call in (mine, others):
        await guarded.cancel(call)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_only_a_router_can_do_is_refused_by_field(guarded: Guarded) -> None:
    unimplemented, pod = grpc.StatusCode.UNIMPLEMENTED, guarded.pod
    bad_words = inference_pb2.Sampling(bad_words=["x"])
    for call in (
        pod.generate(token_ids=None, text="Hi"),
        pod.generate(sampling=bad_words),
        pod.inference.Tokenize(inference_pb2.TokenizeRequest(text="Hi")),
        pod.inference.Detokenize(inference_pb2.DetokenizeRequest(ids=[1])),
        pod.inference.Route(inference_pb2.RouteRequest()),
    ):
        assert await refusal(call) == (unimplemented, "UNSUPPORTED")
    assert await refusal(pod.generate(model="another")) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert (await refusal(pod.generate(sampling=inference_pb2.Sampling(n=0))))[0] is grpc.StatusCode.INVALID_ARGUMENT
    [model] = (await pod.inference.ListModels(inference_pb2.ListModelsRequest())).models
    assert (model.name, model.contract) == (INFO.model, INFO.contract)


def test_tickets_without_identities_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(KEY)
    with structlog.testing.capture_logs() as logs:
        Callers([], TicketKeys(tmp_path / "keys"))
        Callers(["router"], TicketKeys(tmp_path / "keys"))
    assert [line["log_level"] for line in logs] == ["warning"]


def test_identities_without_an_authority_of_callers_are_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"^router_identities: .*tls_client_ca"):
        DetokenizerSettings.load(["--listen=unix:/s", "--engine=unix:/e", "--router-identities=r"], prog="", environ={})


@pytest.mark.asyncio(loop_scope="module")
async def test_new_key_is_taken_while_the_replica_serves(guarded: Guarded) -> None:
    new = b"n" * 32
    assert await refusal(guarded.client.generate(ticket(new))) == (grpc.StatusCode.UNAUTHENTICATED, "TICKET_INVALID")
    guarded.keys.write_bytes(new + b"\n" + KEY)
    for key in (new, KEY):
        call = guarded.client.generate(ticket(key))
        await guarded.begun(call)
        await guarded.cancel(call)
