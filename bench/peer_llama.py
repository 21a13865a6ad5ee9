"""Serves a GGUF with llama.cpp on the loopback interface and prints the address. Runs in the peers' environment.

.venv-peer/bin/python bench/peer_llama.py MODEL.gguf
"""

from __future__ import annotations

import os
import signal
import sys

import xllamacpp  # type: ignore[import-not-found]  # it is there, not here


def main() -> None:
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.hostnames = ["127.0.0.1"]
    params.n_parallel = 1
    params.n_ctx = 8192
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
