"""What steps' numbers pass through on their way to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvern.engine.device_copy import HostReader, PinnedRing


class Event:
    """Implements what a ring asks of a CUDA event."""

    def __init__(self) -> None:
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


def test_numbers_land_at_the_beginning_and_leave_the_rest() -> None:
    destination = torch.full((6,), 9)
    ring = PinnedRing(destination, num_buffers=3)
    ring.copy([1, 2, 3])
    ring.copy([4])
    assert destination.tolist() == [4, 2, 3, 9, 9, 9]
    masks = torch.zeros(2, dtype=torch.int32)
    PinnedRing(masks, 2).copy(np.array([-1, 7], dtype=np.int32))
    assert masks.tolist() == [-1, 7]


def test_a_buffer_is_written_again_only_when_the_device_has_read_it() -> None:
    ring = PinnedRing(torch.zeros(2, dtype=torch.int64), num_buffers=3)
    events: list[Any] = [Event(), Event(), Event()]
    for number in range(3):
        ring.copy([number])
    ring._read = events
    ring.copy([3])
    assert [event.num_waits for event in events] == [1, 0, 0]
    ring.copy([4])
    assert [event.num_waits for event in events] == [1, 1, 0]
    assert len({buffer.data_ptr() for buffer in ring._buffers}) == 3


def test_on_a_cpu_results_are_where_they_were_made() -> None:
    tensor = torch.arange(3)
    reader = HostReader(torch.device("cpu"))
    assert reader.copy(tensor) is tensor
    assert reader.mark() is None
