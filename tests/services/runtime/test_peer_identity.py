from __future__ import annotations

import pytest

from kvern.services.runtime.peer_identity import matches


@pytest.mark.parametrize("name", ["spiffe://kvern/router", "a.routers.svc", "routers.svc"])
def test_identity_matches_its_own_name_alone(name: str) -> None:
    assert matches(name, name)
    assert not matches(f"x.{name}", name)
    assert not matches(f"{name}.x", name)


@pytest.mark.parametrize(
    ("name", "is_meant"),
    [
        ("one.routers.svc", True),
        ("a-2.b.routers.svc", True),
        ("routers.svc", False),
        ("xrouters.svc", False),
        ("one.routers.svc.evil", False),
        ("spiffe://cluster/ns/evil/sa/x.routers.svc", False),
        ("https://evil/x.routers.svc", False),
        ("me@evil.routers.svc", False),
    ],
)
def test_suffix_matches_dns_names_alone(name: str, is_meant: bool) -> None:
    """Accounts may be called x.routers.svc, and stand in URIs that authorities sign."""
    assert matches(name, "*.routers.svc") is is_meant
