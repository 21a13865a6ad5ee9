from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from cryptography.hazmat.primitives import serialization
from prometheus_client import CollectorRegistry

from kvern.services.router.identity import jwks
from kvern.services.router.identity.caller import Role
from kvern.services.router.identity.jwks import Jwks, parse_keys
from kvern.services.router.identity.jwt_tokens import MAX_TOKEN_CHARS, JwtTokens, TokenRules
from kvern.services.router.identity.rejection import Cause, Rejected
from kvern.services.runtime.errors import Unavailable

from .issuer import AUDIENCE, ISSUER, Issuer, serving_keys

RULES = TokenRules(ISSUER, AUDIENCE, "tenant", "roles")


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with serving_keys(Issuer()) as issuer:
        yield issuer


@pytest.fixture
def tokens(issuer: Issuer) -> JwtTokens:
    issuer.answer, issuer.speaks_http = None, True
    return JwtTokens(RULES, Jwks(issuer.url))


async def _cause(tokens: JwtTokens, token: str) -> Cause:
    with pytest.raises(Rejected) as rejected:
        await tokens.identify(token)
    return rejected.value.cause


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
async def test_token_of_the_issuer_is_its_tenants(tokens: JwtTokens, issuer: Issuer, algorithm: str) -> None:
    caller = await tokens.identify(issuer.token(algorithm, roles=["admin", "of another service"]))
    assert (caller.tenant, caller.roles) == ("acme", {Role.ADMIN})
    subject = hashlib.sha256(f"{ISSUER}\0me".encode()).hexdigest()[:16]
    assert caller.id == f"token:{subject}"


async def test_token_without_roles_is_a_users(tokens: JwtTokens, issuer: Issuer) -> None:
    assert (await tokens.identify(issuer.token())).roles == {Role.USER}
    assert (await tokens.identify(issuer.token(roles="user admin"))).roles == {Role.USER, Role.ADMIN}
    assert (await tokens.identify(issuer.token(roles=[]))).roles == frozenset()


@pytest.mark.parametrize(
    ("claims", "cause"),
    [
        ({"aud": "another"}, Cause.INVALID),
        ({"aud": None}, Cause.INVALID),
        ({"iss": "https://other.example"}, Cause.INVALID),
        ({"exp": 1000}, Cause.EXPIRED),
        ({"exp": None}, Cause.INVALID),
        ({"nbf": time.time() + 3600}, Cause.INVALID),
        ({"sub": None}, Cause.INVALID),
        ({"tenant": None}, Cause.INVALID),
        ({"tenant": ["acme"]}, Cause.INVALID),
        ({"tenant": "acme\nroot"}, Cause.INVALID),
        ({"roles": {"admin": True}}, Cause.INVALID),
    ],
)
async def test_token_that_says_something_wrong_is_rejected(
    tokens: JwtTokens, issuer: Issuer, claims: dict[str, object], cause: Cause
) -> None:
    assert await _cause(tokens, issuer.token(**claims)) is cause


async def test_token_a_little_out_of_time_is_taken(tokens: JwtTokens, issuer: Issuer) -> None:
    await tokens.identify(issuer.token(exp=time.time() - 10, nbf=time.time() - 60))
    await tokens.identify(issuer.token(nbf=time.time() + 10))


async def test_subject_that_is_no_text_is_a_subject_like_others(tokens: JwtTokens, issuer: Issuer) -> None:
    assert (await tokens.identify(issuer.token(sub="\ud800"))).id.startswith("token:")


async def test_token_signed_by_nobody_is_rejected(tokens: JwtTokens, issuer: Issuer) -> None:
    header, claims, _ = issuer.token().split(".")
    none = _encoded({"alg": "none", "kid": "RS256"})
    assert await _cause(tokens, f"{none}.{claims}.") is Cause.INVALID
    assert await _cause(tokens, f"{header}.{claims}.") is Cause.INVALID


async def test_token_signed_with_the_public_key_as_a_secret_is_rejected(tokens: JwtTokens, issuer: Issuer) -> None:
    public = issuer.rsa.public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    signed = f"{_encoded({'alg': 'HS256', 'kid': 'RS256'})}.{issuer.token().split('.')[1]}"
    mac = base64.urlsafe_b64encode(hmac.digest(pem, signed.encode(), "sha256")).rstrip(b"=").decode()
    assert await _cause(tokens, f"{signed}.{mac}") is Cause.INVALID


async def test_token_of_one_key_under_anothers_id_is_rejected(tokens: JwtTokens, issuer: Issuer) -> None:
    assert await _cause(tokens, issuer.token("RS256", kid="ES256")) is Cause.INVALID
    other = Issuer()
    assert await _cause(tokens, other.token("ES256")) is Cause.INVALID


@pytest.mark.parametrize("token", ["a.b.c", "..", "x" * MAX_TOKEN_CHARS + ".b.c", "[" * 6000 + ".b.c"])
async def test_token_that_is_none_is_rejected(tokens: JwtTokens, token: str) -> None:
    assert await _cause(tokens, token) is Cause.MALFORMED


async def test_token_that_demands_extensions_is_rejected(tokens: JwtTokens, issuer: Issuer) -> None:
    _, claims, signature = issuer.token().split(".")
    header = _encoded({"alg": "RS256", "kid": "RS256", "crit": ["x"], "x": 1})
    assert await _cause(tokens, f"{header}.{claims}.{signature}") in (Cause.INVALID, Cause.MALFORMED)


async def test_unknown_key_ids_in_a_flood_fetch_the_keys_once(tokens: JwtTokens, issuer: Issuer) -> None:
    await tokens.identify(issuer.token())
    before = issuer.num_fetches
    flood = (_cause(tokens, issuer.token("ES256", kid=f"unknown-{number}")) for number in range(200))
    assert set(await asyncio.gather(*flood)) == {Cause.UNKNOWN}
    assert issuer.num_fetches == before


async def test_new_key_of_the_issuer_is_fetched_when_a_token_names_it(
    tokens: JwtTokens, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tokens.identify(issuer.token())
    monkeypatch.setattr(jwks, "MIN_INTERVAL_S", 0.0)
    monkeypatch.setitem(issuer.private, "PS256", issuer.rsa)
    await tokens.identify(issuer.token("PS256"))


@pytest.mark.parametrize(
    ("answer", "speaks_http"),
    [
        (b"no JSON", True),
        (b"[]", True),
        (b'{"keys": []}'[:5], True),
        (b" " * (jwks.MAX_BYTES + 1), True),
        (b"[" * 200_000, True),
        (b"SSH-2.0-OpenSSH\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n", False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", False),
    ],
)
async def test_keys_that_cannot_be_had_leave_those_known_in_force(
    tokens: JwtTokens, issuer: Issuer, monkeypatch: pytest.MonkeyPatch, answer: bytes, speaks_http: bool
) -> None:
    """Nor does what answers in the issuer's place end the router, which would raise what a fetch does."""
    await tokens.identify(issuer.token())
    monkeypatch.setattr(jwks, "MIN_INTERVAL_S", 0.0)
    issuer.answer, issuer.speaks_http = answer, speaks_http
    assert await _cause(tokens, issuer.token(kid="unknown")) is Cause.UNKNOWN
    await tokens.identify(issuer.token())


async def test_age_of_the_keys_counts_from_when_they_were_last_had(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "MIN_INTERVAL_S", 0.0)
    registry, keys = CollectorRegistry(), Jwks(issuer.url)
    jwks.tell_age(registry, keys)

    async def fetched_at(answer: bytes | None) -> float:
        issuer.answer, issuer.speaks_http = answer, True
        with suppress(Unavailable):
            await keys.find("unknown")
        value = registry.get_sample_value("kvern_router_issuer_keys_fetched_timestamp_seconds")
        assert value is not None
        return value

    assert await fetched_at(b"no JSON") == 0
    began_at = time.time()
    first = await fetched_at(None)
    assert began_at <= first <= time.time()
    assert await fetched_at(b"no JSON") == first
    assert await fetched_at(None) > first


async def test_issuer_away_from_the_start_is_no_fault_of_the_callers(issuer: Issuer) -> None:
    tokens = JwtTokens(RULES, Jwks("http://127.0.0.1:9/keys"))
    with pytest.raises(Unavailable):
        await tokens.identify(issuer.token())


async def test_keys_come_from_a_file_too(issuer: Issuer, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("jwks") / "jwks.json"
    file.write_bytes(issuer.jwks())
    await JwtTokens(RULES, Jwks(str(file))).identify(issuer.token())


def test_keys_that_check_no_signatures_are_left_out(issuer: Issuer) -> None:
    entry = json.loads(issuer.jwks())["keys"][0]
    secret = {"kty": "oct", "k": "c2VjcmV0", "kid": "secret", "alg": "HS256"}
    unusable = [secret, entry | {"use": "enc"}, entry | {"alg": "HS256"}, entry | {"n": "AQAB"}, {"kty": "RSA"}, "text"]
    assert parse_keys(json.dumps({"keys": unusable}).encode()) == {}


def _encoded(part: dict[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()
