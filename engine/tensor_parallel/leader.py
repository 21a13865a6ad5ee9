"""Rank 0's side: it starts the other ranks, tells them each plan, and notices when one is gone."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kvern.engine.config import EngineConfig
from kvern.engine.errors import RankLost
from kvern.engine.plan import Plan, Runner, SampledTokens, Submission
from kvern.engine.tensor_parallel.group import join, leave
from kvern.engine.tensor_parallel.messages import PlanWriter, Start
from kvern.engine.tensor_parallel.shard import Shard

_WORKER = "kvern.engine.tensor_parallel.worker"

_END_TIMEOUT_S = 5
"""How long a worker may take to end once an exchange with it has failed."""


@dataclass(frozen=True, slots=True)
class _Worker:
    shard: Shard
    process: subprocess.Popen[bytes]
    connection: Connection


class Workers:
    """The processes of the ranks beside 0. They end with this one, and with the thread that made them."""

    def __init__(self, config: EngineConfig, on_lost: Callable[[RankLost], object] | None) -> None:
        """Start them; they load their shards. `on_lost` is told, on a thread of its own, if one of them ends.

        Each is a new Python (a fork would share locks and a CUDA context with threads that it does not have).
        """
        self._on_lost = on_lost
        self._directory = TemporaryDirectory(prefix="kvern-ranks-")  # nobody else may enter it
        self._rendezvous = Path(self._directory.name) / "rendezvous"
        self._closing = False
        self._lost = threading.Event()
        self._error: RankLost | None = None
        shards = [Shard(rank, config.tensor_parallel_size) for rank in range(1, config.tensor_parallel_size)]
        self._workers = [_start(config, shard, self._rendezvous) for shard in shards]
        for worker in self._workers:
            threading.Thread(target=self._watch, args=[worker], name="rank watch", daemon=True).start()

    def join(self, device: torch.device) -> None:
        """Meet the ranks once all have loaded. Raises RankLost."""
        with self.guarded():
            for worker in self._workers:
                worker.connection.recv()
            self.tell(True)
            join(Shard(0, len(self._workers) + 1), device, self._rendezvous)

    def tell(self, message: object) -> None:
        """Send every rank the same."""
        data = ForkingPickler.dumps(message)
        for worker in self._workers:
            worker.connection.send_bytes(data)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Raise RankLost for what fails within because a rank is gone."""
        try:
            yield
        except (EOFError, OSError, RuntimeError) as error:
            # A connection may break a moment before its process is known to be gone.
            if self._lost.wait(_END_TIMEOUT_S) and self._error is not None:
                raise self._error from error
            raise

    def close(self) -> None:
        """End the processes. Once is enough."""
        if self._closing:
            return
        self._closing = True
        for worker in self._workers:
            worker.process.kill()  # they hold nothing that anybody needs
            worker.process.wait()
            worker.connection.close()
        leave()
        self._directory.cleanup()

    def _watch(self, worker: _Worker) -> None:
        returncode = worker.process.wait()
        if not self._closing and not self._lost.is_set():
            self._error = RankLost(worker.shard.rank, worker.shard.size, returncode)
            self._lost.set()
            if self._on_lost is not None:
                self._on_lost(self._error)


class LeadingRunner:
    """Rank 0's runner, which has the others run each plan too. Implements `Runner`."""

    def __init__(self, runner: Runner, workers: Workers) -> None:
        self._runner = runner
        self._workers = workers
        self._plans = PlanWriter()

    def submit(self, plan: Plan) -> Submission:
        with self._workers.guarded():
            self._workers.tell(self._plans.write(plan))
            return _LeadingSubmission(self._runner.submit(plan), self._workers)


@dataclass(frozen=True, slots=True)
class _LeadingSubmission:
    submission: Submission
    workers: Workers

    def result(self) -> SampledTokens:
        with self.workers.guarded():
            return self.submission.result()


def _start(config: EngineConfig, shard: Shard, rendezvous: Path) -> _Worker:
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", _WORKER, str(theirs.fileno()), str(os.getpid())], pass_fds=[theirs.fileno()]
        )
    ours.send(Start(config, shard, rendezvous))
    return _Worker(shard, process, ours)
