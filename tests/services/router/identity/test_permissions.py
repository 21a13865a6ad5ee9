from __future__ import annotations

import pytest

from kvern.services.router.identity.caller import Caller, Role
from kvern.services.router.identity.permissions import role_for
from kvern.v1 import inference_pb2, router_pb2

USERS = {"Generate", "Tokenize", "Detokenize", "ListModels"}


def test_every_method_of_a_router_has_the_role_it_should() -> None:
    inference = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
    for method in inference.methods:
        expected = Role.USER if method.name in USERS else Role.ADMIN
        assert role_for(f"/{inference.full_name}/{method.name}") is expected
    for method in router_pb2.DESCRIPTOR.services_by_name["RouterService"].methods:
        assert role_for(f"/kvern.v1.RouterService/{method.name}") is Role.ADMIN


@pytest.mark.parametrize(
    "method",
    [
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/kvern.v1.InferenceService/GenerateMore",
        "/kvern.v1.InferenceService",
        "/grpc.health.v1.HealthAdmin/Check",
        "",
    ],
)
def test_method_that_nobody_thought_of_is_the_admins(method: str) -> None:
    assert role_for(method) is Role.ADMIN


def test_health_is_everybodys() -> None:
    assert role_for("/grpc.health.v1.Health/Watch") is None


def test_admin_may_what_users_may_and_not_the_other_way_round() -> None:
    admin = Caller("", "", frozenset({Role.ADMIN}))
    assert admin.has(Role.USER)
    assert not Caller("", "").has(Role.ADMIN)
    assert not Caller("", "", frozenset()).has(Role.USER)
