from __future__ import annotations

import hashlib
import hmac

from hypothesis import given
from hypothesis import strategies as st

from kvern.services.router.confinement import confine
from kvern.services.router.identity.caller import ANONYMOUS, Caller
from kvern.services.router.identity.policy import TenantPolicy
from kvern.services.router.identity.salts import Salts
from kvern.v1 import inference_pb2

SECRET = b"s" * 32
PAIRS = st.tuples(st.text(max_size=4), st.text(max_size=4))


@given(PAIRS, PAIRS)
def test_salts_of_different_tenants_or_clients_salts_differ(one: tuple[str, str], other: tuple[str, str]) -> None:
    salts = Salts(SECRET)
    assert (salts.salt(*one) == salts.salt(*other)) == (one == other)


def test_salt_is_an_hmac_over_the_tenants_length_its_name_and_the_clients_salt() -> None:
    message = b"\x04\0\0\0\0\0\0\0acmemine"
    assert Salts(SECRET).salt("acme", "mine") == hmac.new(SECRET, message, hashlib.sha256).hexdigest()
    assert Salts(b"t" * 32).salt("acme", "mine") != Salts(SECRET).salt("acme", "mine")


def test_alias_tells_nothing_of_the_tenant_without_the_secret() -> None:
    aliases = {Salts(secret).alias(tenant) for secret in (SECRET, b"t" * 32) for tenant in ("acme", "other")}
    assert len(aliases) == 4


def test_confined_request_runs_no_earlier_than_its_tenant_may() -> None:
    caller = Caller("key:a", "acme", policy=TenantPolicy(priority_cap=5))
    for asked, runs_at in ((-1, 5), (5, 5), (6, 6)):
        request = inference_pb2.GenerateRequest(priority=asked)
        confine(request, caller, None)
        assert request.priority == runs_at


def test_confined_request_without_tenants_stays_as_it_is() -> None:
    request = inference_pb2.GenerateRequest(priority=-3, cache=inference_pb2.Cache(salt="mine"))
    expected = request.SerializeToString()
    confine(request, ANONYMOUS, None)
    assert request.SerializeToString() == expected
