from __future__ import annotations

import pytest

from kvern.services.router.identity.tenants import Tenants
from kvern.services.runtime.errors import PermissionDenied

FILE = b"""
default: {tokens_per_minute: 7}
tenants:
  acme: {models: [a], priority_cap: 0, max_concurrent: 2, tokens_per_minute: 100}
  free: {}
certificates:
  - {name: "spiffe://cluster/acme", tenant: acme, roles: [admin]}
"""


def test_policy_of_a_listed_tenant_is_its_own() -> None:
    policy = Tenants.parse(FILE).policy_of("acme")
    assert (policy.priority_cap, policy.max_concurrent, policy.tokens_per_minute) == (0, 2, 100)
    assert policy.allows("a")
    assert not policy.allows("b")
    assert Tenants.parse(FILE).policy_of("free").allows("b")


def test_tenant_that_is_not_listed_is_refused_or_gets_the_default() -> None:
    with pytest.raises(PermissionDenied) as refused:
        Tenants.parse(FILE).policy_of("other")
    assert refused.value.reason == "UNKNOWN_TENANT"
    assert Tenants.parse(FILE + b"unknown_tenants: default\n").policy_of("other").tokens_per_minute == 7


def test_certificate_is_whose_name_is_in_it() -> None:
    tenants = Tenants.parse(FILE)
    caller = tenants.caller_with(frozenset({"localhost", "spiffe://cluster/acme"}))
    assert caller is not None
    assert (caller.id, caller.tenant) == ("certificate:spiffe://cluster/acme", "acme")
    assert tenants.caller_with(frozenset({"spiffe://cluster"})) is None


@pytest.mark.parametrize("file", [b"tenants: {acme: {max_concurrent: 0}}", b"tenants: {acme: {token: 1}}", b"x: 1"])
def test_file_with_a_fault_is_refused(file: bytes) -> None:
    with pytest.raises(ValueError, match=r"tenants\.acme|x: Extra"):
        Tenants.parse(file)
