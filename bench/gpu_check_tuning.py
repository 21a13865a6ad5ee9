"""The stage of `make gpu-check TUNE=1`: which tilings are fastest here, written into the tables of `kernels/`.

What spills on another GPU is not seen here: `tests/kernels/triton/compile_all.py` tells.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_check_finding import Finding
from triton.runtime.errors import OutOfResources, PTXASError

from kvern.kernels import target
from kvern.kernels.experts import bench as experts_bench
from kvern.kernels.experts import configurations as experts_table
from kvern.kernels.experts import kernel as experts_kernel
from kvern.kernels.paged_attention import bench, triton_backend
from kvern.kernels.paged_attention import configurations as attention_table

_LEAST_GAIN = 1.02
"""What the table is changed for: less is within the error of measurement."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Configurations of one row of a table, and what to time them on."""

    name: str
    module: Any
    """Whose name `chooser` returns a configuration, whatever it is asked."""
    chooser: str
    present: Any
    """The row as it is: a dataclass."""
    candidates: list[Any]
    measure: Callable[[], float]
    """Returns seconds."""
    source: Path
    table: str
    keys: tuple[int, ...]
    """Of the row, in the table."""


def tune(device: str, known: dict[str, float]) -> Iterator[Finding]:
    gpu, architecture = torch.device(device), target.architecture()
    for make in (_decode_sweep, _prefill_sweep, _experts_sweep):
        yield from run_sweep(make(gpu, architecture))
        torch.cuda.empty_cache()


def run_sweep(sweep: Sweep) -> Iterator[Finding]:
    """Time every candidate, and write the fastest into its table if it gains enough."""
    present_s = _time(sweep, sweep.present)
    if present_s is None:
        yield Finding(sweep.name, error="the present configuration cannot be launched")
        return
    seconds = {candidate: _time(sweep, candidate) for candidate in sweep.candidates}
    fitting = {candidate: took for candidate, took in seconds.items() if took is not None}
    best = min(fitting, key=fitting.__getitem__, default=sweep.present)
    gain = present_s / fitting.get(best, present_s)
    yield Finding(f"{sweep.name}: the fastest of {len(fitting)} over the present one", gain, "x")
    if gain < _LEAST_GAIN:
        return
    try:
        changed = with_row(sweep.source.read_text(), sweep.table, sweep.keys, repr(best))
    except LookupError:
        yield Finding(f"{sweep.name}: there is no row for this GPU; the fastest is", repr(best))
        return
    sweep.source.write_text(changed)
    yield Finding(f"{sweep.name}: written to {sweep.source.parent.name}/{sweep.source.name}", repr(best))


def _time(sweep: Sweep, configuration: Any) -> float | None:
    """Return seconds. None: the GPU has not the registers or the shared memory for it."""
    with mock.patch.object(sweep.module, sweep.chooser, return_value=configuration):
        try:
            return sweep.measure()
        except (OutOfResources, PTXASError):
            return None


def with_row(text: str, table: str, keys: tuple[int, ...], row: str) -> str:
    """Return Python source in which one entry of a table, a literal dict, perhaps of dicts, is another expression.

    Raises LookupError where the table has no such entry.
    """
    node = _value_of(ast.parse(text), table)
    for key in keys:
        node = _entry_of(node, key)
    lines = text.splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: (node.end_lineno or 0) - 1])) + (node.end_col_offset or 0)
    return text[:begin] + row + text[end:]


def _value_of(module: ast.Module, name: str) -> ast.expr:
    for statement in module.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            return statement.value
    raise LookupError(f"there is no table {name}")


def _entry_of(node: ast.expr, key: int) -> ast.expr:
    if isinstance(node, ast.Dict):
        for name, value in zip(node.keys, node.values, strict=True):
            if isinstance(name, ast.Constant) and name.value == key:
                return value
    raise LookupError(f"there is no row for {key}")


def _decode_sweep(device: torch.device, architecture: int) -> Sweep:
    kv = bench.make_pool(64 * 4096 // 16, 16, torch.bfloat16, device)
    present = attention_table.decode_configuration(architecture, 2, bench.HEAD_DIM)
    options = product((32, 64, 128), (4,), (3, 5, 7), (1, 2, 3, 4))
    return Sweep(
        name="decode attention",
        module=triton_backend,
        chooser="decode_configuration",
        present=present,
        candidates=[attention_table.DecodeConfiguration(*each) for each in options],
        measure=lambda: bench.measure(kv, 64, 4096, 1).seconds,
        source=Path(attention_table.__file__),
        table="_DECODE",
        keys=(architecture, bench.HEAD_DIM),
    )


def _prefill_sweep(device: torch.device, architecture: int) -> Sweep:
    kv = bench.make_pool(8192 // 16, 16, torch.bfloat16, device)
    present = attention_table.prefill_configuration(architecture, 2, bench.HEAD_DIM)
    options = product((64, 128), (64, 128), (4, 8), (3, 5))
    return Sweep(
        name="prefill attention",
        module=triton_backend,
        chooser="prefill_configuration",
        present=present,
        candidates=[attention_table.PrefillConfiguration(*each) for each in options],
        measure=lambda: bench.measure(kv, 1, 8192, 8192).seconds,
        source=Path(attention_table.__file__),
        table="_PREFILL",
        keys=(architecture, bench.HEAD_DIM),
    )


def _experts_sweep(device: torch.device, architecture: int) -> Sweep:
    """On 64 tokens, where reading the weights is what takes time."""
    from kvern.kernels.ceilings import median_s

    work = next(work for work in experts_bench.works(device) if work.name == "64 tokens")
    present = experts_table.choose(architecture, torch.bfloat16)
    options = product((16, 32, 64), (64, 128), (64, 128), (4,), (3, 4))
    return Sweep(
        name="experts",
        module=experts_kernel,
        chooser="choose",
        present=present,
        candidates=[experts_table.Configuration(*each) for each in options],
        measure=partial(median_s, work.launch),
        source=Path(experts_table.__file__),
        table="_HALF",
        keys=(architecture,),
    )
