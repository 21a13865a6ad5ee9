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
    command = [sys.executable, "-m", f"kvern.services.{service}", *flags]
    command += ["--log-format", "json", "--drain-delay-s", str(drain_delay_s)]
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(*command, stderr=stderr)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
