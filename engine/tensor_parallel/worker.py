"""`python -m kvern.engine.tensor_parallel.worker`: the process of a rank other than 0, which starts it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

from kvern.engine.errors import EngineError
from kvern.engine.model.loader import load_model
from kvern.engine.startup import build_runner
from kvern.engine.tensor_parallel.group import join
from kvern.engine.tensor_parallel.messages import PlanReader, Start

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, leader_pid: int) -> None:
    """Do what rank 0 says until it is gone."""
    _die_with(leader_pid)
    # They are for rank 0, which may have requests to finish.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    logging.basicConfig(level=logging.ERROR)  # rank 0 gives the warnings
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError):  # rank 0 is gone, and this process in a moment
        _run(connection.recv(), connection)


def _run(start: Start, connection: Connection) -> None:
    """Run steps for ever."""
    model = load_model(start.config, shard=start.shard)
    connection.send(True)
    connection.recv()
    join(start.shard, model.device, start.rendezvous)
    runner, _ = build_runner(model, start.config)
    plans = PlanReader()
    while True:
        runner.submit(plans.read(connection.recv())).finish()


def _die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it is gone, however that came. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it was gone before we asked
        sys.exit(1)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except EngineError as error:
        sys.exit(f"kvern engine, a rank other than 0: {error}")
