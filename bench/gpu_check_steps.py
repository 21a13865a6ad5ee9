"""The stage of `make gpu-check` that runs a model of Llama 3 8B's shape, with random weights, in a whole engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import median
from unittest import mock

import torch
from gpu_check_finding import Finding
from gpu_check_kernels import PRODUCTS, READS
from gpu_check_model import RunningEngine, llama_shape, make_request, random_model
from gpu_check_rates import SAMPLER

from kvern.engine.core import Abort
from kvern.engine.model.config import ModelConfig
from kvern.engine.model.loader import LoadedModel
from kvern.engine.plan import StepResult
from kvern.engine.request import SamplingParams

LLAMA_3_8B = llama_shape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    max_position_embeddings=8192,
)
_SPREAD = 0.02
_SAMPLING = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
_MAX_NUM_BATCHED_TOKENS = 8192
_SPARE_TOKENS = 128
"""Of each request beyond the measured steps: those whose prompt was first decode while others' are computed."""


_SPARE_BYTES = 8 << 30
"""For activations and CUDA graphs."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """A batch of sequences that generate."""

    num_seqs: int
    context_len: int
    aim: float
    """Times of what reading weights and KV takes."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is run."""

    shape: ModelConfig
    dtype: torch.dtype
    decodes: tuple[Decodes, ...]
    prompt_len: int
    """Of the prompt whose computation is timed."""
    num_steps: int

    @property
    def num_blocks(self) -> int:
        """Blocks of 16 tokens for the largest batch, and what admission keeps in reserve."""
        tokens = [each.num_seqs * (each.context_len + self.num_steps + _SPARE_TOKENS) for each in self.decodes]
        return max(*tokens, self.shape.max_position_embeddings) // 16 + 256

    @property
    def needed_bytes(self) -> int:
        """Weights, the embedding among them, KV, and room for the rest."""
        embedding = self.dtype.itemsize * self.shape.vocab_size * self.shape.hidden_size
        return self.weight_bytes + embedding + self.num_blocks * 16 * self.kv_token_bytes + _SPARE_BYTES

    @property
    def weight_bytes(self) -> int:
        """What a step reads of the weights: all but the embedding, of which it reads some rows."""
        return self.dtype.itemsize * (self.product_weights + self.shape.vocab_size * self.shape.hidden_size)

    @property
    def product_weights(self) -> int:
        """Weights of the layers' products."""
        shape = self.shape
        heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        return shape.num_layers * shape.hidden_size * (heads + 3 * shape.intermediate_size)

    @property
    def kv_token_bytes(self) -> int:
        shape = self.shape
        return self.dtype.itemsize * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim

    @property
    def prompt_operations(self) -> int:
        """Of products and causal attention over one prompt. The head computes one row."""
        shape, length = self.shape, self.prompt_len
        attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * length * (length + 1)
        return 2 * length * self.product_weights + attention


WORKLOAD = Workload(
    LLAMA_3_8B,
    torch.bfloat16,
    (Decodes(64, 4096, 1.25), Decodes(64, 1024, 1.35), Decodes(1, 1024, 1.3)),
    prompt_len=_MAX_NUM_BATCHED_TOKENS - 192,
    num_steps=200,
)


@dataclass(slots=True)
class GraphTimer:
    """What CUDA graphs take on the device, while it is on."""

    is_on: bool = False
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def take_s(self) -> float:
        """Wait for the device, and return the seconds since the last call."""
        if self.pairs:
            torch.cuda.synchronize()
        taken_s: float = sum(begin.elapsed_time(end) for begin, end in self.pairs) / 1000
        self.pairs.clear()
        return taken_s


@contextlib.contextmanager
def timed_graphs() -> Iterator[GraphTimer]:
    """Put an event before and one behind each graph that is launched. Engines must be built within."""
    timer, replay = GraphTimer(), torch.cuda.CUDAGraph.replay

    def timed_replay(graph: torch.cuda.CUDAGraph) -> None:
        if not timer.is_on:
            replay(graph)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        replay(graph)
        end.record()
        timer.pairs.append((begin, end))

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", timed_replay):
        yield timer


@dataclass(slots=True)
class Decoded:
    """Steps in which every sequence of a batch decoded."""

    seconds: list[float] = field(default_factory=list)
    context_tokens: list[int] = field(default_factory=list)
    """Of all sequences together, in each step."""
    wall_s: float = 0.0
    graph_s: float = 0.0
    """Of the wall time. 0: no graph was launched."""


def measure_steps(device: str, known: dict[str, float], workload: Workload = WORKLOAD) -> Iterator[Finding]:
    if device != "cpu" and torch.cuda.mem_get_info()[0] < workload.needed_bytes:
        yield Finding("not measured", f"{workload.needed_bytes / 2**30:.0f} GiB of free memory are needed")
        return
    model = random_model(workload.shape, workload.dtype, torch.device(device), _SPREAD)
    with timed_graphs() as timer:
        started = time.monotonic()
        engine = start_engine(model, workload, workload.num_blocks)
        yield Finding("engine start, weights not counted", time.monotonic() - started, "s", at_most=60.0)
        runs = EngineRuns(engine, workload, timer)
        rate = workload.prompt_operations / runs.prefill_s() / 1e12
        yield Finding(f"prefill of {workload.prompt_len:,}", rate, "TFLOP/s")
        yield Finding("prefill, of products", rate / known[PRODUCTS], "%", at_least=0.55)
        for decodes in workload.decodes:
            yield from _figures(decodes, runs.decode(decodes), workload, known)
        engine.close()


def start_engine(model: LoadedModel, workload: Workload, num_blocks: int) -> RunningEngine:
    return RunningEngine(
        model,
        max_num_seqs=max(each.num_seqs for each in workload.decodes),
        max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS,
        num_blocks=num_blocks,
        enable_prefix_caching=False,
    )


def start_one_layer(device: str, workload: Workload = WORKLOAD) -> None:
    """Start an engine and end it, for what it compiles: depth makes no difference to that."""
    shape = replace(
        workload.shape, num_layers=1, sliding_windows=workload.shape.sliding_windows[:1], ropes=workload.shape.ropes[:1]
    )
    model = random_model(shape, workload.dtype, torch.device(device), _SPREAD)
    start_engine(model, workload, shape.max_position_embeddings // 16).close()


def _figures(decodes: Decodes, decoded: Decoded, workload: Workload, known: dict[str, float]) -> Iterator[Finding]:
    name = f"decode step {decodes.num_seqs} x {decodes.context_len:,}"
    step_s = median(decoded.seconds)
    needed = [
        (workload.weight_bytes + tokens * workload.kv_token_bytes) / (known[READS] * 1e9)
        for tokens in decoded.context_tokens
    ]
    ratio = median(took / least for took, least in zip(decoded.seconds, needed, strict=True))
    yield Finding(name, step_s * 1e3, "ms")
    yield Finding(f"{name}, over reading what it needs", ratio, "x", at_most=decodes.aim)
    if decoded.graph_s:
        yield Finding(f"{name}, idle", 1 - decoded.graph_s / decoded.wall_s, "%", at_most=0.03)
    if SAMPLER in known and decodes == workload.decodes[0]:
        yield Finding("sampler, of that step", known[SAMPLER] / 1e6 / step_s, "%", at_most=0.03)


class EngineRuns:
    """Requests of random tokens to one engine, one batch after another."""

    def __init__(self, engine: RunningEngine, workload: Workload, timer: GraphTimer) -> None:
        self._engine = engine
        self._workload = workload
        self._timer = timer
        self._ids = count()

    def prefill_s(self) -> float:
        """Return the seconds from a prompt to its first token, after one to warm up."""
        times = []
        for _ in range(3):
            started = time.monotonic()
            self._add(1, self._workload.prompt_len, max_tokens=1)
            next(result for result in self._engine.results() if result.ended)
            times.append(time.monotonic() - started)
        return min(times[1:])

    def decode(self, decodes: Decodes) -> Decoded:
        """Compute the prompts, then time steps in which all sequences decode."""
        num_steps = self._workload.num_steps
        prompt_len = decodes.context_len - num_steps // 2
        ids = self._add(decodes.num_seqs, prompt_len, max_tokens=num_steps + _SPARE_TOKENS)
        num_tokens = decodes.num_seqs * prompt_len
        decoded = Decoded()
        started = 0.0
        for result in self._engine.results():
            num_tokens += len(result.token_ids)
            if not _is_decode_of(result, decodes.num_seqs):
                continue
            if not self._timer.is_on:  # the first of them only begins the measurement
                self._timer.is_on, started = True, time.monotonic()
                continue
            assert result.step is not None
            decoded.seconds.append(result.step.seconds)
            decoded.context_tokens.append(num_tokens)
            if len(decoded.seconds) == num_steps:
                break
        decoded.wall_s, self._timer.is_on = time.monotonic() - started, False
        decoded.graph_s = self._timer.take_s()
        self._abort(ids)
        return decoded

    def _add(self, num_seqs: int, prompt_len: int, max_tokens: int) -> list[int]:
        ids = [next(self._ids) for _ in range(num_seqs)]
        vocab_size = self._workload.shape.vocab_size
        prompts = torch.randint(vocab_size, (num_seqs, prompt_len)).tolist()
        requests = [make_request(i, prompt, max_tokens, _SAMPLING) for i, prompt in zip(ids, prompts, strict=True)]
        self._engine.add(*requests)
        return ids

    def _abort(self, ids: list[int]) -> None:
        """Drop requests, and wait until the engine has."""
        for request_id in ids:
            self._engine.send(Abort(request_id))
        next(r for r in self._engine.results() if not r.load.num_running and not r.load.num_waiting)


def _is_decode_of(result: StepResult, num_seqs: int) -> bool:
    step = result.step
    return step is not None and step.num_seqs == step.num_tokens == num_seqs
