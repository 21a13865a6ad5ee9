"""A router process that knows its callers: who is let in, as whom, and what is written down of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvern.services.router.identity.api_keys import hash_of
from kvern.services.runtime.health import WHOLE_FLEET
from kvern.v1 import inference_pb2, replica_pb2, router_pb2
from tests.services.scraping import scrape, scrape_until

from . import scripted
from .guarded import ADMIN, ADMIN_WITH_LIMITS, KEY_OF_THE_FLEET, Guarded, Metadata, bearer, guarding, key_of, keys_file
from .identity.issuer import Issuer, serving_keys
from .scripted import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with serving_keys(Issuer()) as issuer:
        yield issuer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory, issuer: Issuer) -> AsyncIterator[Guarded]:
    async with guarding(tmp_path_factory.mktemp("router"), issuer) as guarded:
        yield guarded


@pytest_asyncio.fixture(loop_scope="module")
async def guarded(started: Guarded) -> Guarded:
    for peer in (started.tokenizer, *started.replicas):
        peer.digest_key = KEY_OF_THE_FLEET
    for replica in started.replicas:
        replica.reset()
    await started.becomes(SERVING, WHOLE_FLEET)
    return started


async def _generate(guarded: Guarded, metadata: Metadata, **fields: object) -> inference_pb2.GenerateRequest:
    """Run a request to its end, and return what a replica got of it."""
    request = inference_pb2.GenerateRequest(**{"text": "Hi", **fields})  # type: ignore[arg-type]
    async for _ in guarded.inference.Generate(request, metadata=metadata, timeout=20):
        pass
    [received] = [each for replica in guarded.replicas for each in replica.received]
    for replica in guarded.replicas:
        replica.received.clear()
    return received


async def _failure(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value


async def _refusal(guarded: Guarded, metadata: Metadata, **fields: object) -> grpc.aio.AioRpcError:
    return await _failure(_generate(guarded, metadata, **fields))


async def _is_let_in(guarded: Guarded, metadata: Metadata) -> bool:
    call = guarded.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
    return await call.code() is grpc.StatusCode.OK


def _details(error: grpc.aio.AioRpcError) -> tuple[str, float | None]:
    """Return reason and retry delay."""
    packed = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    details = status_pb2.Status.FromString(packed).details  # type: ignore[arg-type]
    for detail in details:
        detail.Unpack(info) or detail.Unpack(retry)
    return info.reason, retry.retry_delay.ToMilliseconds() / 1000 if retry.HasField("retry_delay") else None


async def test_caller_without_good_credentials_is_refused_and_not_told_why(guarded: Guarded) -> None:
    token = guarded.issuer.token
    wrong: dict[str, Metadata] = {
        "missing": (),
        "malformed": (("authorization", "Basic a2V5"),),
        "unknown": bearer("no key"),
        "expired": bearer("an old key"),
        "invalid": bearer(token(aud="another")),
    }
    before = await scrape(guarded.status)
    refusals = {cause: await _refusal(guarded, metadata) for cause, metadata in wrong.items()}
    assert {refusal.code() for refusal in refusals.values()} == {grpc.StatusCode.UNAUTHENTICATED}
    assert {refusal.details() for refusal in refusals.values()} == {"the credentials are missing or not valid"}
    after = await scrape(guarded.status)
    for cause in wrong:
        name = "kvern_router_unauthenticated_total"
        assert after(name, cause=cause) - before(name, cause=cause) == 1
    assert "no key" not in guarded.log.read_text() + after.text


async def test_two_credentials_at_once_are_refused(guarded: Guarded) -> None:
    refusal = await _refusal(guarded, (*key_of("acme"), *key_of("other")))
    assert refusal.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_key_and_token_of_a_tenant_are_of_one_salt_and_no_other_tenants(guarded: Guarded) -> None:
    by_key = await _generate(guarded, key_of("acme"))
    by_token = await _generate(guarded, bearer(guarded.issuer.token("ES256", tenant="acme")))
    by_other = await _generate(guarded, key_of("other"))
    salted = await _generate(guarded, key_of("acme"), cache=inference_pb2.Cache(salt="mine"))
    stolen = await _generate(guarded, key_of("other"), cache=inference_pb2.Cache(salt=by_key.cache.salt))
    assert by_key.cache.salt == by_token.cache.salt
    assert len({each.cache.salt for each in (by_key, by_other, salted, stolen)}) == 4
    assert all(len(each.cache.salt) == 64 for each in (by_key, by_other, salted, stolen))


async def test_texts_of_tenants_are_remembered_apart(guarded: Guarded) -> None:
    guarded.tokenizer.scopes.clear()
    request = inference_pb2.TokenizeRequest(text="Hi")
    for tenant in ("acme", "other"):
        await guarded.inference.Tokenize(request, metadata=key_of(tenant))
        await _generate(guarded, key_of(tenant))
    scopes = guarded.tokenizer.scopes
    assert scopes[0] == scopes[1] != scopes[2] == scopes[3]
    assert "" not in scopes


async def test_request_runs_no_earlier_than_its_tenants_cap(guarded: Guarded) -> None:
    assert (await _generate(guarded, key_of("late"), priority=-7)).priority == 5
    assert (await _generate(guarded, key_of("late"), priority=9)).priority == 9
    assert (await _generate(guarded, key_of("acme"), priority=-7)).priority == -7


async def test_model_that_a_tenant_may_not_use_is_as_if_it_did_not_exist(guarded: Guarded) -> None:
    metadata = key_of("elsewhere")
    forbidden = await _refusal(guarded, metadata, model=MODEL)
    absent = await _refusal(guarded, metadata, model="another")
    assert forbidden.code() is absent.code() is grpc.StatusCode.NOT_FOUND
    assert str(forbidden.details()).replace(MODEL, "another") == absent.details()
    assert (await _refusal(guarded, metadata)).code() is grpc.StatusCode.NOT_FOUND
    tokenize = guarded.inference.Tokenize(inference_pb2.TokenizeRequest(text="Hi", model=MODEL), metadata=metadata)
    assert (await _failure(tokenize)).code() is grpc.StatusCode.NOT_FOUND
    request = inference_pb2.ListModelsRequest()
    assert not (await guarded.inference.ListModels(request, metadata=metadata)).models
    assert (await guarded.inference.ListModels(request, metadata=key_of("single"))).models[0].name == MODEL


async def test_requests_beyond_a_tenants_limits_are_refused_with_a_reason(guarded: Guarded) -> None:
    for replica in guarded.replicas:
        replica.behaviour = scripted.stall_after_start
    request = inference_pb2.GenerateRequest(text="Hi")
    call = guarded.inference.Generate(request, metadata=key_of("single"), timeout=20)
    await call.read()
    refusal = await _refusal(guarded, key_of("single"))
    assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert _details(refusal) == ("TENANT_CONCURRENCY", 1.0)
    tokenize = inference_pb2.TokenizeRequest(text="Hi")
    await guarded.inference.Tokenize(tokenize, metadata=key_of("single"))  # has a place of its own
    for replica in guarded.replicas:
        replica.reset()
    await _generate(guarded, key_of("acme"))
    call.cancel()
    await _generate(guarded, key_of("frugal"), text="x" * 90)
    reason, retry_s = _details(await _refusal(guarded, key_of("frugal")))
    assert reason == "TENANT_TOKENS"
    assert retry_s is not None
    assert 20 < retry_s <= 31
    now = await scrape(guarded.status)
    for reason in ("TENANT_CONCURRENCY", "TENANT_TOKENS"):
        assert now("kvern_router_sheds_total", model=MODEL, reason=reason) == 1
    # What alerts subtract from the failures, model by model.
    assert now("kvern_router_requests_total", model=MODEL, code="RESOURCE_EXHAUSTED") == 2


async def test_calls_beyond_a_tenants_limit_that_generate_nothing_are_refused(guarded: Guarded) -> None:
    metadata = key_of("single")
    tokenize = inference_pb2.TokenizeRequest(text="Hi")
    guarded.tokenizer.hangs = True
    try:
        calls = (guarded.inference.Tokenize(tokenize, metadata=metadata, timeout=20) for _ in range(2))
        tasks = [asyncio.create_task(_failure(call)) for call in calls]
        [refused], [admitted] = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert _details(await refused) == ("TENANT_CONCURRENCY", 1.0)
        detokenize = guarded.inference.Detokenize(inference_pb2.DetokenizeRequest(ids=[65]), metadata=metadata)
        assert _details(await _failure(detokenize)) == ("TENANT_CONCURRENCY", 1.0)
        admitted.cancel()
    finally:
        guarded.tokenizer.hangs = False


async def test_tokens_of_a_stream_that_is_resumed_count_as_its_prompts_do(guarded: Guarded) -> None:
    choice = inference_pb2.ChoiceProgress(token_ids=b"x" * 70)
    await _generate(guarded, key_of("resumer"), resume=inference_pb2.Resume(seed=1, choices=[choice]))
    assert _details(await _refusal(guarded, key_of("resumer")))[0] == "TENANT_TOKENS"


async def test_prompt_that_is_routed_with_a_ticket_counts_against_its_tenants_limit(
    guarded: Guarded,
) -> None:
    request = inference_pb2.RouteRequest(request=inference_pb2.GenerateRequest(text="x" * 90))
    assert (await guarded.inference.Route(request, metadata=ADMIN_WITH_LIMITS)).ticket
    refusal = await _failure(guarded.inference.Route(request, metadata=ADMIN_WITH_LIMITS))
    reason, retry_s = _details(refusal)
    assert reason == "TENANT_TOKENS"
    assert retry_s is not None
    assert 20 < retry_s <= 31


async def test_how_busy_replicas_are_is_told_to_admins_alone(guarded: Guarded) -> None:
    """What waits at a replica is what other tenants have asked for."""
    for metadata, is_told in ((key_of("acme"), False), (ADMIN, True)):
        call = guarded.inference.Generate(inference_pb2.GenerateRequest(text="Hi"), metadata=metadata, timeout=20)
        assert [response async for response in call]
        told = {key for key, _ in await call.trailing_metadata() if key.startswith("kvern-")}
        assert "kvern-replica" in told
        assert ("kvern-cost" in told) is is_told


async def test_request_id_of_another_tenant_is_free(guarded: Guarded) -> None:
    for replica in guarded.replicas:
        replica.behaviour = scripted.stall_after_start
    request = inference_pb2.GenerateRequest(text="Hi", request_id="mine")
    calls = [guarded.inference.Generate(request, metadata=key_of(tenant), timeout=20) for tenant in ("acme", "other")]
    for call in calls:
        response = await call.read()
        assert isinstance(response, inference_pb2.GenerateResponse)
        assert response.started.request_id == "mine"
    assert (await _refusal(guarded, key_of("acme"), request_id="mine")).code() is grpc.StatusCode.ALREADY_EXISTS
    for call in calls:
        call.cancel()


async def test_user_may_not_call_what_is_the_operators(guarded: Guarded) -> None:
    user, route = key_of("acme"), inference_pb2.RouteRequest(request=inference_pb2.GenerateRequest(text="Hi"))
    calls = {
        "/kvern.v1.InferenceService/Route": guarded.inference.Route(route, metadata=user),
        "/kvern.v1.RouterService/ListReplicas": guarded.router.ListReplicas(
            router_pb2.ListReplicasRequest(), metadata=user
        ),
        "/kvern.v1.RouterService/DrainReplica": guarded.router.DrainReplica(
            router_pb2.DrainReplicaRequest(replica=guarded.replicas[0].address), metadata=user
        ),
        "/kvern.v1.RouterService/ResetCache": guarded.router.ResetCache(
            router_pb2.ResetCacheRequest(model=MODEL), metadata=user
        ),
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _reflecting(guarded, user).read(),
    }
    for method, call in calls.items():
        assert (await _failure(call)).code() is grpc.StatusCode.PERMISSION_DENIED
        line = await guarded.logged(lambda line, method=method: line.get("method") == method)  # type: ignore[misc]
        assert (line["logger"], line["event"], line["outcome"]) == ("kvern.audit", "admin action", "PERMISSION_DENIED")
        assert (line["actor"], line["tenant"]) == ("key:acme-1", "acme")
    assert all(replica.num_resets == 0 for replica in guarded.replicas)
    assert (await guarded.inference.Route(route, metadata=ADMIN)).address
    assert "kvern.v1.InferenceService" in await _reflected(guarded, ADMIN)


async def test_admin_drains_a_replica_and_takes_it_back(guarded: Guarded) -> None:
    drained, other = guarded.replicas
    request = router_pb2.DrainReplicaRequest(replica=drained.address)
    response = await guarded.router.DrainReplica(request, metadata=ADMIN)
    assert response.replica.state == drained.state
    for _ in range(3):
        await _generate(guarded, key_of("acme"))
    request.undo = True
    await guarded.router.DrainReplica(request, metadata=ADMIN)
    other.state = replica_pb2.REPLICA_STATE_STARTING
    await guarded.becomes(NOT_SERVING, WHOLE_FLEET)
    await _generate(guarded, key_of("acme"))
    other.reset()
    await guarded.becomes(SERVING, WHOLE_FLEET)
    line = await guarded.logged(lambda line: line.get("method") == "DrainReplica")
    assert (line["actor"], line["target"], line["outcome"]) == ("key:ops", drained.address, "OK")
    await guarded.logged(lambda line: line.get("method") == "UndrainReplica")


async def test_admin_resets_the_caches_of_a_model_or_a_replica(guarded: Guarded) -> None:
    for replica in guarded.replicas:
        replica.num_resets = 0
    reset = router_pb2.ResetCacheRequest
    response = await guarded.router.ResetCache(reset(model=MODEL), metadata=ADMIN)
    assert {each.address for each in response.replicas} == {replica.address for replica in guarded.replicas}
    await guarded.router.ResetCache(reset(replica=guarded.replicas[1].address), metadata=ADMIN)
    assert [replica.num_resets for replica in guarded.replicas] == [1, 2]
    forged = "none\n{}" + "x" * 200
    assert (await _failure(guarded.router.ResetCache(reset(replica=forged), metadata=ADMIN))).code() in (
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    line = await guarded.logged(lambda line: line.get("outcome") == "NOT_FOUND")
    assert line["target"] == ("none?{}" + "x" * 200)[:128]
    assert (await _failure(guarded.router.ResetCache(reset(), metadata=ADMIN))).code() is (
        grpc.StatusCode.INVALID_ARGUMENT
    )


async def test_every_call_is_logged_with_who_made_it_and_nothing_it_held(guarded: Guarded) -> None:
    request_id = "a name\nof two lines"
    await _generate(guarded, key_of("acme"), text="a secret prompt", request_id=request_id)
    line = await guarded.logged(lambda line: line.get("request_id") == "a name?of two lines")
    assert (line["tenant"], line["caller"], line["status"]) == ("acme", "key:acme-1", "OK")
    assert {"prompt_tokens", "completion_tokens", "first_token_s", "duration_s"} <= line.keys()
    await guarded.inference.Tokenize(inference_pb2.TokenizeRequest(text="a secret"), metadata=key_of("other"))
    line = await guarded.logged(lambda line: line.get("method") == "Tokenize" and line["tenant"] == "other")
    assert (line["event"], line["caller"], line["status"]) == ("call ended", "key:other-1", "OK")
    assert "secret" not in guarded.log.read_text()


async def test_file_of_keys_is_read_again_and_a_broken_one_changes_nothing(guarded: Guarded) -> None:
    assert (await _refusal(guarded, bearer("a new key"))).code() is grpc.StatusCode.UNAUTHENTICATED
    guarded.keys.write_text(keys_file(f"- {{id: new, tenant: acme, sha256: {hash_of('a new key')}}}"))
    await guarded.logged(lambda line: line.get("event") == "changed files are in use")
    await _generate(guarded, bearer("a new key"))
    guarded.keys.write_text("keys: [")
    await guarded.logged(lambda line: "stays in use" in str(line.get("event")))
    await _generate(guarded, bearer("a new key"))
    guarded.keys.write_text(keys_file())
    async with asyncio.timeout(20):
        while await _is_let_in(guarded, bearer("a new key")):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await _generate(guarded, key_of("acme"))


async def test_a_thousand_tenants_and_request_ids_add_no_series(guarded: Guarded) -> None:
    """H08."""
    await _generate(guarded, bearer(guarded.issuer.token("ES256", tenant="tenant-x")))
    before = await scrape(guarded.status)

    async def run(number: int) -> None:
        token = guarded.issuer.token("ES256", tenant=f"tenant-{number}", sub=f"user-{number}")
        request = inference_pb2.GenerateRequest(text="Hi", request_id=f"id-{number}", session_id=f"session-{number}")
        async for _ in guarded.inference.Generate(request, metadata=bearer(token), timeout=60):
            pass

    for first in range(0, 1000, 50):
        await asyncio.gather(*map(run, range(first, first + 50)))
    name = "kvern_router_requests_total"
    after = await scrape_until(guarded.status, lambda now: now(name, code="OK") >= before(name, code="OK") + 1000)
    assert after.samples.keys() == before.samples.keys()


async def test_router_whose_peers_have_no_secret_digest_key_is_not_ready_and_says_so(guarded: Guarded) -> None:
    guarded.tokenizer.digest_key = ""
    await guarded.becomes(NOT_SERVING)
    await guarded.logged(lambda line: "give the tokenizer digest_key_file" in str(line.get("event")))
    guarded.tokenizer.digest_key = KEY_OF_THE_FLEET
    await guarded.becomes(SERVING)


async def test_replica_without_the_fleets_digest_key_gets_no_requests(guarded: Guarded) -> None:
    await guarded.becomes(SERVING, WHOLE_FLEET)
    public, other = guarded.replicas
    for key, text in (("", "digest_key_file"), ("f" * 16, "never found")):
        public.digest_key = key
        told = f"{text} of {public.address}"
        await guarded.logged(lambda line, told=told: told in f"{line.get('event')} of {line.get('of')}")  # type: ignore[misc]
        await guarded.becomes(NOT_SERVING, WHOLE_FLEET)
        public.num_sent = 0
        await _generate(guarded, key_of("acme"))
        assert not public.num_sent
    public.digest_key = KEY_OF_THE_FLEET
    await guarded.becomes(SERVING, WHOLE_FLEET)
    assert other.digest_key == KEY_OF_THE_FLEET


def _reflecting(guarded: Guarded, metadata: Metadata) -> grpc.aio.StreamStreamCall[Any, Any]:
    stub = reflection_pb2_grpc.ServerReflectionStub(guarded.channel)
    call: grpc.aio.StreamStreamCall[Any, Any] = stub.ServerReflectionInfo(metadata=metadata, timeout=20)
    return call


async def _reflected(guarded: Guarded, metadata: Metadata) -> list[str]:
    call = _reflecting(guarded, metadata)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    response = await call.read()
    call.cancel()
    return [service.name for service in response.list_services_response.service]
