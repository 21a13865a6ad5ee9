"""From the host's numbers to the device's tensors, and back. Nothing here waits unless it says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def to_device(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy numbers, nested as the tensor is to be; from pinned memory to a GPU, so that nothing waits."""
    is_gpu = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=is_gpu).to(device, non_blocking=True)


class PinnedRing:
    """Host memory that steps' numbers are copied from into one place on the device.

    There is a buffer for each step in flight and two more, so that the host seldom finds one that the device has still
    to read; then it waits.
    """

    def __init__(self, destination: Tensor, num_buffers: int) -> None:
        """destination: flat, of a type of numbers. Its address stays: a CUDA graph may read it."""
        self._destination = destination
        self._is_gpu = destination.is_cuda
        self._buffers = [
            torch.zeros(destination.shape, dtype=destination.dtype, pin_memory=self._is_gpu) for _ in range(num_buffers)
        ]
        self._read: list[Any] = [None] * num_buffers
        """Events: the device has read the buffer. None: nothing was copied from it."""
        self._next = 0

    def copy(self, values: list[int] | NDArray[np.int32]) -> None:
        """Copy numbers to the beginning of the destination, in the order of what else the device is given."""
        at, self._next = self._next, (self._next + 1) % len(self._buffers)
        if (event := self._read[at]) is not None:
            event.synchronize()
        buffer = self._buffers[at][: len(values)]
        buffer.copy_(torch.as_tensor(values, dtype=buffer.dtype))
        self._destination[: len(values)].copy_(buffer, non_blocking=True)
        if self._is_gpu:
            self._read[at] = torch.cuda.current_stream().record_event()


class HostReader:
    """Copies results to pinned memory on a stream of its own, beside the steps that follow."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the host that is filled when an event marked later comes. On a CPU it is the same one."""
        if self._stream is None:
            return tensor
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            on_host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return on_host

    def mark(self) -> Any:
        """Return an event that comes when all launched so far is done and copied. None: it is."""
        if self._stream is None:
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        return self._stream.record_event()
