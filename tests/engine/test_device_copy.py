"""What steps' numbers pass through on their way to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvern.engine.device_copy import HostReader, PinnedRing

CPU = torch.device("cpu")


class Event:
    """Implements what a ring asks of a CUDA event."""

    def __init__(self) -> None:
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


def test_numbers_land_at_the_beginning_and_leave_the_rest() -> None:
    ring, destination = PinnedRing(CPU, num_buffers=3), torch.full((6,), 9)
    ring.copy(torch.tensor([1, 2, 3]), destination)
    ring.copy(torch.tensor([4]), destination)
    assert destination.tolist() == [4, 2, 3, 9, 9, 9]
    table = torch.zeros(3, 2, dtype=torch.int32)
    ring.copy(torch.tensor([7], dtype=torch.int32), table[1])
    assert table.tolist() == [[0, 0], [7, 0], [0, 0]]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([[1, 2], [3, 4]], torch.int64),
        ([], torch.int64),
        ([True, False], torch.bool),
        ((0.1, -2.5, 1e30), torch.float32),
        (np.array([[-1, 7]], dtype=np.int32), torch.int32),
    ],
)
def test_numbers_keep_shape_type_and_value(values: Any, dtype: torch.dtype) -> None:
    ring = PinnedRing(CPU, num_buffers=2, buffer_bytes=16)
    ring.to_device([True], torch.bool)  # what follows is aligned all the same
    actual, expected = ring.to_device(values, dtype), torch.tensor(values, dtype=dtype)
    assert actual.dtype is dtype
    assert torch.equal(actual, expected)


def test_a_buffer_is_written_again_only_when_the_device_has_read_it() -> None:
    ring = PinnedRing(CPU, num_buffers=3)
    events: list[Any] = [Event(), Event(), Event()]
    ring._read = events
    for step in range(3):
        ring.turn()
        ring.to_device([step])
    assert [event.num_waits for event in events] == [1, 1, 1]
    ring.turn()
    assert [event.num_waits for event in events] == [1, 2, 1]
    assert len({buffer.data_ptr() for buffer in ring._buffers}) == 3


def test_within_a_step_nothing_is_written_over() -> None:
    """The device may still have to read all of it."""
    ring = PinnedRing(CPU, num_buffers=2, buffer_bytes=64)
    ring.to_device([1, 2, 3])
    ring.to_device([4, 5])
    ring.to_device([6])
    held = ring._buffers[0].view(torch.int64).tolist()
    assert (held[:3], held[4:6], held[6]) == ([1, 2, 3], [4, 5], 6)


def test_what_a_buffer_has_no_room_for_goes_on_in_the_next_ones() -> None:
    """More than the whole ring holds: it waits for the device as often as it comes around."""
    ring = PinnedRing(CPU, num_buffers=2, buffer_bytes=64)
    events: list[Any] = [Event(), Event()]
    ring._read = events
    ring.to_device([1.5], torch.float32)
    assert ring.to_device(list(range(23))).tolist() == list(range(23))
    assert [event.num_waits for event in events] == [1, 2]


def test_on_a_cpu_results_are_where_they_were_made() -> None:
    tensor = torch.arange(3)
    reader = HostReader(CPU)
    assert reader.copy(tensor) is tensor
    assert reader.mark() is None
