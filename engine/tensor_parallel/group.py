"""Where ranks meet: torch.distributed's group of one machine."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from kvern.engine.tensor_parallel.shard import Shard

_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits in an exchange for the others. All are in the same step, so nothing honest takes as long."""


def join(shard: Shard, device: torch.device, rendezvous: Path) -> None:
    """Meet the other ranks: over NCCL for what is in GPUs' memory, over gloo for what is in the host's.

    Nothing leaves the machine.
    rendezvous: a file that none but the ranks can reach, and that is not there yet.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=rendezvous.as_uri(),
        timeout=_TIMEOUT,
        rank=shard.rank,
        world_size=shard.size,
    )


def leave() -> None:
    """Let go of the others, if they were met."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
