"""Every method of every gRPC service, called with messages that are wrong, odd or no messages.

make fuzz INPUTS=100000
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2

from kvern.client import Client
from kvern.services.runtime.channel import CHANNEL_OPTIONS
from kvern.v1 import engine_pb2, inference_pb2, replica_pb2, router_pb2, tokenizer_pb2
from kvern.v1.replica_pb2_grpc import ReplicaServiceStub
from tests.up_process import UpProcess, free_port, wait_all_ready

from .messages import Request, bad_messages

NUM_INPUTS = int(os.environ.get("FUZZ_INPUTS", "0"))
"""In all, of the long run; by default each method gets FEW, the same ones every time."""

FEW = 20

TIMEOUT_S = 60.0
"""What takes this long hangs."""

MAX_RESPONSES = 8
"""After which the caller of a stream goes away."""

OUR_FAULT = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}

QUIET_S = 0.2
"""Without a response, after which what is endless has nothing to tell."""

ENDLESS = {"SubscribeKvEvents", "Watch", "WatchBlocks"}
"""What tells of changes for as long as it is asked. Its first response comes at once, or nothing does."""

_SMG = "smg"

_SERVICES: list[tuple[str, Any]] = [
    ("router", inference_pb2.DESCRIPTOR),
    ("router", router_pb2.DESCRIPTOR),
    ("router", health_pb2.DESCRIPTOR),
    ("router", reflection_pb2.DESCRIPTOR),
    ("tokenizer", tokenizer_pb2.DESCRIPTOR),
    ("detokenizer-0", replica_pb2.DESCRIPTOR),
    ("detokenizer-0", inference_pb2.DESCRIPTOR),
    ("engine-0", engine_pb2.DESCRIPTOR),
    (_SMG, vllm_engine_pb2.DESCRIPTOR),
]
"""Who serves the services of which files."""

_STOPPING = inference_pb2.Stopping(max_tokens=2)
_GENERATE = inference_pb2.GenerateRequest(
    text="Hello", stopping=_STOPPING, sampling=inference_pb2.Sampling(temperature=0)
)
_SERVED = inference_pb2.GenerateRequest(
    request_id="a",
    model="smollm2",
    token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]),
    stopping=_STOPPING,
    sampling=inference_pb2.Sampling(seed=1),
)

_RIGHT: list[Message] = [
    _GENERATE,
    inference_pb2.TokenizeRequest(text="Hello"),
    inference_pb2.DetokenizeRequest(ids=[1, 2]),
    inference_pb2.RouteRequest(request=_GENERATE),
    replica_pb2.ServeRequest(request=_SERVED),
    tokenizer_pb2.EncodePromptRequest(text="Hello"),
    tokenizer_pb2.DecodeTokensRequest(token_ids=[1, 2]),
    engine_pb2.ConnectRequest(
        add=engine_pb2.AddRequest(
            id=1, prompt_token_ids=[1, 2, 3], sampling=inference_pb2.Sampling(seed=1), stopping=_STOPPING
        )
    ),
    vllm_engine_pb2.GenerateRequest(
        request_id="a",
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[1, 2, 3]),
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=2),
        stream=True,
    ),
]
"""Requests that nothing is wrong with, of the methods that read much."""


class Method(NamedTuple):
    """A method, and where it is served."""

    server: str
    descriptor: MethodDescriptor

    def __str__(self) -> str:
        return f"{self.server}{self.path}"

    @property
    def path(self) -> str:
        return f"/{self.descriptor.containing_service.full_name}/{self.descriptor.name}"

    @property
    def right(self) -> Message:
        kind = GetMessageClass(self.descriptor.input_type)
        if self.server == "detokenizer-0" and kind is inference_pb2.GenerateRequest:
            return _SERVED
        return next((message for message in _RIGHT if isinstance(message, kind)), kind())


METHODS = [
    Method(server, method)
    for server, file in _SERVICES
    for service in file.services_by_name.values()
    for method in service.methods
]

SERVERS = list(dict.fromkeys(method.server for method in METHODS))


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[UpProcess, dict[str, grpc.Channel]]]:
    """A set of its own, for what it is called with might harm it, and channels to all that it serves on."""
    smg = f"127.0.0.1:{free_port()}"
    flags = ["--max-model-len=64", "--num-blocks=256", "--num-threads=1", f"--smg-listen={smg}", "--smg-kv-events"]
    with UpProcess(tmp_path_factory.mktemp("fuzzed"), *flags) as up, ExitStack() as stack:
        up.wait_ready()
        addresses = {server: f"unix:{up.sockets}/{server}.sock" for server, _ in _SERVICES} | {_SMG: smg}
        yield (
            up,
            {
                server: stack.enter_context(grpc.insecure_channel(address, options=CHANNEL_OPTIONS))
                for server, address in addresses.items()
            },
        )


@pytest.mark.timeout(7200 if NUM_INPUTS else 300)
@pytest.mark.parametrize("server", SERVERS)
def test_bad_input_is_the_callers_fault_and_leaves_the_services_as_they_were(
    server: str, fuzzed: tuple[UpProcess, dict[str, grpc.Channel]]
) -> None:
    up, channels = fuzzed
    before = up.children()
    methods = [method for method in METHODS if method.server == server]

    @settings(
        max_examples=(NUM_INPUTS // len(METHODS) or FEW) * len(methods),
        derandomize=not NUM_INPUTS,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink] if NUM_INPUTS else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(methods).flatmap(_bad_calls))
    def try_one(call: tuple[Method, list[Request]]) -> None:
        method, requests = call
        code, details = _call(channels[server], method, [request.content for request in requests])
        assert code not in OUR_FAULT, (code, details)

    try_one()
    assert up.children() == before, "a service was restarted"
    # It may have been told to drain, which is nobody's fault.
    ReplicaServiceStub(channels["detokenizer-0"]).SetDraining(replica_pb2.SetDrainingRequest(), timeout=TIMEOUT_S)
    with Client(up.listen) as client:
        wait_all_ready(client)
        answer = client.generate("The capital of France is", max_tokens=3, temperature=0)
        assert "".join(getattr(event, "text", "") for event in answer).strip().startswith("Paris")
    up.wait_idle()


def _bad_calls(method: Method) -> st.SearchStrategy[tuple[Method, list[Request]]]:
    max_requests = 4 if method.descriptor.client_streaming else 1
    return st.tuples(st.just(method), st.lists(bad_messages(method.right), min_size=1, max_size=max_requests))


def _call(channel: grpc.Channel, method: Method, requests: list[bytes]) -> tuple[grpc.StatusCode, str]:
    """Call a method with bytes, take a few responses, and return how it ended."""
    descriptor = method.descriptor
    is_endless = descriptor.name in ENDLESS
    kind = f"{_flow(descriptor.client_streaming)}_{_flow(descriptor.server_streaming)}"
    sent = iter(requests) if descriptor.client_streaming else requests[0]
    call = getattr(channel, kind)(method.path)
    try:
        if not descriptor.server_streaming:
            call(sent, timeout=TIMEOUT_S)
        else:
            responses = call(sent, timeout=QUIET_S if is_endless else TIMEOUT_S)
            with closing(_Cancelled(responses)):
                list(itertools.islice(responses, 1 if is_endless else MAX_RESPONSES))
    except grpc.RpcError as error:
        if not (is_endless and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED):
            return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def _flow(streams: bool) -> str:
    return "stream" if streams else "unary"


class _Cancelled:
    """Cancels a call when closed."""

    def __init__(self, call: grpc.Call) -> None:
        self._call = call

    def close(self) -> None:
        self._call.cancel()
