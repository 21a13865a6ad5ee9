"""What each service of a set pays for a token, in CPU time, while it serves a model.

    python bench/services_cpu.py [MODEL] [--workload c64] [--json] [-- FLAGS OF KVERN UP]

One round of a workload of bench/serve.py comes first and is not counted. Linux only: times are those of /proc, told in
hundredths of a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import click
from generate import KVERN, wait_for_address
from rich import box
from rich.console import Console
from rich.table import Table
from serve import Measured, measure
from serve_workloads import WORKLOADS

from kvern.services.runtime.model_source import DEFAULT_MODEL

STREAMING = ("router", "tokenizer", "detokenizer")
"""What lies between an engine and its clients."""


def cpu_s_of_services(parent: int) -> dict[str, float]:
    """Return the CPU seconds of each process that a set has started, by service."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return {name: _cpu_s(child) for child in children if (name := _service(child)) is not None}


def _service(process: str) -> str | None:
    arguments = Path(f"/proc/{process}/cmdline").read_text().split("\0")
    modules = [each.removeprefix("kvern.services.") for each in arguments if each.startswith("kvern.services.")]
    return modules[0] if modules else None


def _cpu_s(process: str) -> float:
    # Behind the command's name, which may hold spaces: fields from the third on.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_set(model: str, flags: Sequence[str], workload: str) -> tuple[Measured, dict[str, float]]:
    """Return what a workload took, and what each service paid for a token of it, in microseconds."""
    command = [KVERN, "up", model, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = wait_for_address(process)
            seed = time.time_ns()
            measure(f"grpc://{address}", workload, seed)
            before = cpu_s_of_services(process.pid)
            measured = measure(f"grpc://{address}", workload, seed + 1)
            after = cpu_s_of_services(process.pid)
        finally:
            process.terminate()
    return measured, {name: (after[name] - before[name]) / measured.num_tokens * 1e6 for name in after}


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
@click.argument("up_flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--workload", type=click.Choice([*WORKLOADS]), default="c64", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of a table.")
def main(model: str, up_flags: Sequence[str], workload: str, as_json: bool) -> None:
    """Serve MODEL and measure its services. UP_FLAGS, after --, go to kvern up."""
    measured, us_per_token = measure_set(model, up_flags, workload)
    streaming = sum(us_per_token[name] for name in STREAMING)
    if as_json:
        figures = {"us_per_token": us_per_token, "streaming_us_per_token": streaming, "tok_s": measured.tok_s}
        print(json.dumps({"workload": workload} | figures))
        return
    table = Table(title=f"{workload}: {measured.tok_s:,.0f} tokens/s", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("service")
    table.add_column("CPU, us a token", justify="right")
    for name, cost in us_per_token.items():
        table.add_row(name, f"{cost:,.0f}")
    table.add_row(" + ".join(STREAMING), f"{streaming:,.0f}", style="bold")
    Console().print(table)


if __name__ == "__main__":
    main()
