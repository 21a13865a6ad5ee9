"""What is said once a set is ready."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING

import grpc
from rich.console import Console

from kvern.client import DEFAULT_ADDRESS
from kvern.v1.replica_pb2 import EngineInfo, GetReplicaInfoRequest
from kvern.v1.replica_pb2_grpc import ReplicaServiceStub

if TYPE_CHECKING:
    from kvern.supervisor.local_set import LocalSet

_QUESTION = "What is a quern?"


def print_ready(running: LocalSet, console: Console) -> None:
    """Print addresses, model, capacity, log folder, and commands to paste."""
    scheme = "https" if running.has_tls else "http"
    engine = _engine(running)
    console.print(f"Kvern is ready: {engine.model} ({engine.dtype}, {engine.device}), replicas: {running.replicas}")
    for label, text in (
        ("gRPC", str(running.listen)),
        ("HTTP", f"{scheme}://{running.http}/v1"),
        ("capacity", _capacity(engine)),
        ("logs", str(running.logs)),
        *(("metrics", f"{scheme}://{address}/metrics ({name})") for name, address in running.status.items()),
        ("try", _chat_command(running)),
        ("or", _curl_command(f"{scheme}://{running.http.reachable}", engine.model)),
    ):
        console.print(f"  {label:<9} {text}", soft_wrap=True)


def _engine(running: LocalSet) -> EngineInfo:
    """Ask a replica, since the router may answer nobody without credentials."""
    with grpc.insecure_channel(f"unix:{running.sockets / 'detokenizer-0.sock'}") as channel:
        return ReplicaServiceStub(channel).GetReplicaInfo(GetReplicaInfoRequest()).engine


def _capacity(engine: EngineInfo) -> str:
    fit = engine.num_blocks // -(-engine.max_model_len // engine.block_size)
    return (
        f"{engine.num_blocks * engine.block_size:,} KV tokens in {engine.num_blocks:,} blocks a replica: "
        f"{fit:,} requests of {engine.max_model_len:,} tokens"
    )


def _chat_command(running: LocalSet) -> str:
    server = str(running.listen.reachable)
    option = "" if server == DEFAULT_ADDRESS else f" --server {server}"
    tls = " --tls-ca FILE" if running.has_tls else ""
    key = " --api-key-file FILE" if running.asks_callers else ""
    return f'{_command()} chat{option}{tls}{key} "{_QUESTION}"'


def _command() -> str:
    """Return how this command can be typed again: by its path where its folder is not on PATH, as after `make run`."""
    return "kvern" if shutil.which("kvern") else os.path.relpath(sys.argv[0])


def _curl_command(url: str, model: str) -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": _QUESTION}]})
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
