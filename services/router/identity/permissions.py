"""Which role a method asks for."""

from __future__ import annotations

from kvern.services.router.identity.caller import Role

_HEALTH = "/grpc.health.v1.Health/"
_USERS = frozenset(
    f"/kvern.v1.InferenceService/{method}" for method in ("Generate", "Tokenize", "Detokenize", "ListModels")
)


def role_for(method: str) -> Role | None:
    """Return the role that callers of a method must have; None: whoever they are. `method`: /package.Service/Method.

    What is not named here is for admins: where requests go (Route, RouterService), reflection, and what is yet to come.
    """
    if method.startswith(_HEALTH):
        return None
    return Role.USER if method in _USERS else Role.ADMIN
