"""What operations reach of a GPU's ceilings, as a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvern.kernels.ceilings import copy_bandwidth, gemm_flops, median_s


@dataclass(frozen=True, slots=True)
class Work:
    """One launch of an operation, and the least that it takes."""

    name: str
    launch: Callable[[], object]
    num_bytes: int = 0
    """Read and written, each once."""
    operations: int = 0
    """Of products, where those are what takes time."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What one launch reached."""

    name: str
    seconds: float
    rate: float
    """Bytes or operations a second."""
    unit: str
    share: float
    """Of the ceiling: copies within the device for bytes, a large product in bfloat16 for operations."""


def measure_rates(works: Callable[[torch.device], Iterator[Work]], device: torch.device) -> Iterator[Rate]:
    """Measure the ceilings, then each launch."""
    copies, products = copy_bandwidth(device), gemm_flops(device)
    for work in works(device):
        yield measure_rate(work, copies, products)


def measure_rate(work: Work, copies: float, products: float) -> Rate:
    """Measure one launch. copies, products: the ceilings, in bytes and operations a second."""
    seconds = median_s(work.launch)
    if work.operations:
        rate = work.operations / seconds
        return Rate(work.name, seconds, rate, "TFLOP/s", rate / products)
    rate = work.num_bytes / seconds
    return Rate(work.name, seconds, rate, "GB/s", rate / copies)


def print_rates(works: Callable[[torch.device], Iterator[Work]]) -> int:
    """Print a line for each launch. Returns the exit status: 1 where there is no GPU."""
    if not torch.cuda.is_available():
        print("this needs a GPU", file=sys.stderr)
        return 1
    device = torch.device("cuda")
    print(torch.cuda.get_device_name(device))
    for each in measure_rates(works, device):
        scaled = each.rate / (1e12 if each.unit == "TFLOP/s" else 1e9)
        print(
            f"{each.name:40} {each.seconds * 1e6:9.1f} us {scaled:8,.0f} {each.unit} {each.share:5.0%} of the ceiling"
        )
    return 0
