"""What this CPU can do at most, and how long a decode step of a model takes at least, by that.

    python bench/cpu_ceilings.py [MODEL] [--json]

Reading: adding up the integers of 1 GiB. Products: 2,048 tokens by a weight of 2,048 x 2,048 in bfloat16, by oneDNN
and by our own kernel, whichever is faster. Both on as many threads as the engine takes, the best of several rounds:
whatever else runs only takes away. A step's floor is the longer of reading all weights once and multiplying with them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import click
import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from kvern.engine.config import EngineConfig
from kvern.engine.model.layers import Linear
from kvern.engine.model.loader import load_model
from kvern.kernels.cpu import Operation, integers, run, take, thread_kernel
from kvern.kernels.linear import pack
from kvern.kernels.linear.packed import OneDnnWeight
from kvern.services.runtime.model_source import DEFAULT_MODEL, find_model

ROUNDS = 9
BATCHES = (1, 16, 64)
READ_BYTES = 2**30
SIZE = 2048
_PIECE = 2**16
"""Integers that a thread reads at a time."""


@thread_kernel
def _read(arguments):  # type: ignore[no-untyped-def]
    _, address, size, sums = integers(arguments, 4)
    begin = take(arguments, _PIECE)
    while begin < size:
        piece = integers(address + 8 * begin, _PIECE)
        integers(sums, size)[begin // _PIECE] = piece.sum()
        begin = take(arguments, _PIECE)


def read_bytes_per_s() -> float:
    numbers = np.ones(READ_BYTES // 8, np.int64)
    sums = np.zeros(len(numbers) // _PIECE, np.int64)
    operation = Operation(_read, (numbers.ctypes.data, len(numbers), sums.ctypes.data))
    return READ_BYTES / _shortest_s(lambda: run(operation, torch.get_num_threads()))


def operations_per_s() -> float:
    """Return multiplications and additions a second."""
    x, weight = torch.ones(2, SIZE, SIZE, dtype=torch.bfloat16)
    weights = [pack(weight), OneDnnWeight(weight)]
    return 2 * SIZE**3 / min(_shortest_s(lambda packed=packed: packed.product(x, None)) for packed in weights)  # type: ignore[misc]


def _shortest_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def weights_of(model: str) -> int:
    """Return how many weights each token is multiplied with."""
    loaded = load_model(EngineConfig(find_model(model).path, dtype="bfloat16", device="cpu"))
    layers = [layer.packed for layer in loaded.module.modules() if isinstance(layer, Linear)]
    return sum(packed.out_features * packed.in_features for packed in layers if packed is not None)


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of a table.")
@torch.inference_mode()
def main(model: str, as_json: bool) -> None:
    """Measure the CPU, and count what MODEL needs."""
    read, products, num_weights = read_bytes_per_s(), operations_per_s(), weights_of(model)
    floors = {batch: max(2 * num_weights / read, 2 * num_weights * batch / products) for batch in BATCHES}
    if as_json:
        ceilings = {"read_gb_s": read / 1e9, "bfloat16_gflop_s": products / 1e9}
        print(json.dumps(ceilings | {"step_floor_ms": {batch: 1000 * floor for batch, floor in floors.items()}}))
        return
    table = Table("", "", box=box.SIMPLE_HEAD, show_header=False)
    table.add_row("memory, GB/s", f"{read / 1e9:.1f}")
    table.add_row("products in bfloat16, GFLOP/s", f"{products / 1e9:,.0f}")
    for batch, floor in floors.items():
        table.add_row(f"least time of a step of {batch}, ms", f"{1000 * floor:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
