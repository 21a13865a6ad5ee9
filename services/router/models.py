"""Which models the replicas serve."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvern.services.router.identity.policy import UNLIMITED, TenantPolicy
from kvern.services.router.replica import Replica
from kvern.services.runtime.errors import InvalidArgument, NotFound, Unavailable
from kvern.v1 import inference_pb2


class Contract(NamedTuple):
    """What replicas must agree in to reuse each other's blocks."""

    fingerprint: str
    block_size: int
    """Tokens a block."""


def contracts_of(replicas: Iterable[Replica], model: str) -> list[Contract]:
    """Return the contracts of the replicas that can take a request for a model: several in a change of versions."""
    contracts = {
        Contract(engine.contract, engine.block_size): None
        for replica in replicas
        if replica.serves(model) and (engine := replica.engine) is not None
    }
    return list(contracts)


def check_allowed(replicas: Iterable[Replica], name: str, policy: TenantPolicy) -> None:
    """Raise NotFound for a model that a tenant may not use, as for one that does not exist."""
    if name and not policy.allows(name):
        raise _not_found(name, _names(replicas, policy))


def resolve_model(replicas: Iterable[Replica], name: str, policy: TenantPolicy = UNLIMITED) -> str:
    """Return the model a request means; an empty name means the only one that its tenant may use.

    Raises NotFound, InvalidArgument where an empty name is ambiguous, Unavailable while no replica has been seen.
    """
    replicas = list(replicas)
    names = _names(replicas, policy)
    if not names and not _names(replicas, UNLIMITED):
        raise Unavailable("no replica has announced a model yet")
    if not name and len(names) > 1:
        raise InvalidArgument("model", f"must be named where several are served: {', '.join(names)}")
    if not names or (name and name not in names):
        raise _not_found(name, names)
    return name or names[0]


def _names(replicas: Iterable[Replica], policy: TenantPolicy) -> list[str]:
    models = {replica.engine.model for replica in replicas if replica.engine is not None}
    return sorted(filter(policy.allows, models))


def _not_found(name: str, names: Iterable[str]) -> NotFound:
    return NotFound(f"model {name!r} is not served here; served: {', '.join(names)}", reason="MODEL_NOT_FOUND")


def max_context(replicas: Iterable[Replica], model: str) -> int:
    """Return the longest prompt and output together that every replica of a known model can run, in tokens."""
    engines = [replica.engine for replica in replicas if replica.engine is not None]
    return min(engine.max_model_len for engine in engines if engine.model == model)


def list_models(replicas: Iterable[Replica], policy: TenantPolicy = UNLIMITED) -> list[inference_pb2.Model]:
    """Return the models that a tenant can ask for now. Replicas whose KV is not interchangeable are listed apart."""
    models: dict[tuple[str, str], inference_pb2.Model] = {}
    for replica in replicas:
        if replica.is_ready and (engine := replica.engine) is not None and policy.allows(engine.model):
            listed = models.setdefault(
                (engine.model, engine.contract),
                inference_pb2.Model(
                    name=engine.model,
                    max_context=engine.max_model_len,
                    vocab_size=engine.vocab_size,
                    block_size=engine.block_size,
                    contract=engine.contract,
                ),
            )
            listed.max_context = min(listed.max_context, engine.max_model_len)
            listed.ready_replicas += 1
    return list(models.values())
