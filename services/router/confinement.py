"""What a tenant's requests become before anything is done for them."""

from __future__ import annotations

from kvern.services.router.identity.caller import Caller
from kvern.services.router.identity.salts import Salts
from kvern.v1 import inference_pb2


def confine(request: inference_pb2.GenerateRequest, caller: Caller, salts: Salts | None) -> None:
    """Change a request that was checked so that it stays within its caller's tenant.

    Its salt becomes one that no other tenant's request has, and its priority no better than the tenant may have.
    """
    if salts is not None:
        request.cache.salt = salts.salt(caller.tenant, request.cache.salt)
    if (cap := caller.policy.priority_cap) is not None:
        request.priority = max(request.priority, cap)


def text_scope(caller: Caller, salts: Salts | None) -> str:
    """Return the scope of texts that come without a salt."""
    return "" if salts is None else salts.salt(caller.tenant)
