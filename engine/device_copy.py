"""From the host's numbers to the device's tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy numbers, nested as the tensor is to be; from pinned memory to a GPU, so that nothing waits."""
    is_gpu = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=is_gpu).to(device, non_blocking=True)
