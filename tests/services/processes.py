"""Services of Kvern as processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def running(
    service: str, *flags: str, log: Path, drain_delay_s: float = 0
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a service, its log to a file as JSON lines; SIGTERM and wait at the end."""
    arguments = ("-m", f"kvern.services.{service}", *flags, "--log-format=json", f"--drain-delay-s={drain_delay_s}")
    async with running_python(*arguments, log=log) as process:
        yield process


@asynccontextmanager
async def running_python(*arguments: str, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run Python, its standard error to a file; SIGTERM and wait at the end."""
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=stderr)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
