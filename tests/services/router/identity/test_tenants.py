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


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        (b"tenants: {acme: {max_concurrent: 0}}", r"tenants\.acme"),
        (b"tenants: {acme: {token: 1}}", r"tenants\.acme"),
        (b"x: 1", "x: Extra"),
        (FILE.replace(b"free", b"acme"), "line 5: a name is given twice"),
        (FILE + b"default: {}", "line 8: a name is given twice"),
        (FILE + FILE.splitlines()[-1], "certificates: .*two entries have the same name"),
    ],
)
def test_file_with_a_fault_is_refused_naming_it(file: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Tenants.parse(file)


@pytest.mark.parametrize("file", [b"", b"\n", b"# tenants: {acme: {}}"])
def test_file_that_holds_nothing_is_refused(file: bytes) -> None:
    """As it is for a moment when it is written anew in its place: by its word nobody would be served."""
    with pytest.raises(ValueError, match="holds nothing"):
        Tenants.parse(file)


def test_policies_may_be_made_of_another_one() -> None:
    tenants = Tenants.parse(b"tenants: {a: &a {max_concurrent: 1, priority_cap: 1}, b: {<<: *a, priority_cap: 2}}")
    assert (tenants.policy_of("b").max_concurrent, tenants.policy_of("b").priority_cap) == (1, 2)
