"""The read that bandwidth is measured with."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvern.kernels.ceilings import read
from kvern.kernels.launch_case import LaunchCase


def cases() -> Iterator[LaunchCase]:
    yield LaunchCase("read", torch.int32, lambda device: read(torch.zeros(1 << 20, dtype=torch.int32, device=device)))
