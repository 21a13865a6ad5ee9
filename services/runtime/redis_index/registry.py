"""What a replica says of itself in the registry, once a second."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Self

ReplicaState = Literal["starting", "ready", "draining"]


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Load as of the last step. The fields are those of the protocol's ReplicaLoad."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    queued_prefill_tokens: int = 0
    num_streams: int = 0
    num_parked: int = 0


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """One replica, as it announces itself. It counts only while its lease exists."""

    replica: str
    """Id that a restart keeps."""
    address: str
    epoch: int
    """Start time in milliseconds and 16 random bits: the greater is the later."""
    model: str
    contract: str
    block_size: int
    num_blocks: int
    max_model_len: int
    state: ReplicaState
    load: ReplicaLoad = ReplicaLoad()
    step_age_s: float = 0.0
    """Since the engine finished its last step; 0 where it has nothing to do."""
    expected_step_s: float = 0.0

    def to_json(self) -> str:
        # The epoch is text because scripts compare it, and Lua's numbers have 53 bits.
        return json.dumps(asdict(self) | {"epoch": epoch_text(self.epoch)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Fields that this version does not know are ignored. Raises ValueError for what is no entry."""
        try:
            read = json.loads(text)
            read |= {"epoch": int(read["epoch"], 16), "load": ReplicaLoad(**_known(ReplicaLoad, read["load"]))}
            return cls(**_known(cls, read))
        except (TypeError, KeyError) as error:
            raise ValueError(f"not an entry of the registry: {error}") from error

    def draining(self) -> Self:
        return replace(self, state="draining")


def _known(kind: type[RegistryEntry | ReplicaLoad], read: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in read.items() if name in names}


def epoch_text(epoch: int) -> str:
    """Return an epoch with a fixed width: texts compare as the numbers do."""
    return f"{epoch:016x}"
