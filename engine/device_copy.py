"""From the host's numbers to the device's tensors, and back. Nothing here waits unless it says so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BUFFER_BYTES = 4 * 2**20
"""A million tokens of prompts, or grammars' masks of 256 requests for a vocabulary of 128,000."""

_ALIGNMENT = 16


class PinnedRing:
    """Host memory that all of a step's numbers pass through on their way to the device.

    There is a buffer for each step in flight and two more, so that the host seldom finds one that the device has still
    to read; then it waits. What a buffer has no room for goes on in the next one.
    """

    def __init__(self, device: torch.device, num_buffers: int, buffer_bytes: int = _BUFFER_BYTES) -> None:
        """buffer_bytes: a multiple of 16."""
        self.device = device
        self._is_gpu = device.type == "cuda"
        self._buffers = [
            torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=self._is_gpu) for _ in range(num_buffers)
        ]
        self._read: list[Any] = [None] * num_buffers
        """Events: the device has read the buffer. None: it was not asked to."""
        self._at = self._num_used = 0
        """Which buffer is written, and how many of its bytes are."""

    def turn(self) -> None:
        """Go on in the next buffer, once the device has read it. A step begins with this."""
        if self._is_gpu:
            self._read[self._at] = torch.cuda.current_stream().record_event()
        self._at, self._num_used = (self._at + 1) % len(self._buffers), 0
        if (event := self._read[self._at]) is not None:
            event.synchronize()

    def to_device(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return numbers, nested as the tensor is to be, on the device."""
        on_host = torch.as_tensor(values, dtype=dtype)
        out = torch.empty(on_host.shape, dtype=dtype, device=self.device)
        self.copy(on_host.flatten(), out.flatten())
        return out

    def copy(self, values: Tensor, destination: Tensor) -> None:
        """Copy numbers to the beginning of the destination, in the order of what else the device is given.

        Both are flat, and of one type. The destination's address stays: a CUDA graph may read it.
        """
        done = 0
        while done < len(values):
            staged = self._stage(values[done:])
            destination[done : done + len(staged)].copy_(staged, non_blocking=True)
            done += len(staged)

    def _stage(self, values: Tensor) -> Tensor:
        """Write as many numbers as there is room for in one buffer, and return them there."""
        if self._num_used == len(self._buffers[self._at]):
            self.turn()
        room = self._buffers[self._at][self._num_used :].view(values.dtype)
        staged = room[: len(values)].copy_(values[: len(room)])
        self._num_used += -(-staged.nbytes // _ALIGNMENT) * _ALIGNMENT
        return staged


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
