"""Launching a step reads nothing back from the device: on a GPU that would wait for all steps in flight."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from kvern.engine.config import EngineConfig
from kvern.engine.model.loader import LoadedModel
from kvern.engine.plan import Plan
from kvern.engine.request import SamplingParams, StoppingParams
from kvern.engine.startup import build_engine

from .engine_harness import EngineHarness
from .tiny_llama import PROMPT, load, save_tiny

_READS = {
    "item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "masked_select", "unique", "allclose", "equal",
    "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__", "is_nonzero",
}  # fmt: skip
"""What needs a tensor's values, or has a shape that depends on them."""

_CPU_ONLY = (
    "kernels/paged_attention/cpu.py",
    "kernels/paged_attention/gathered.py",
    "kernels/sampling/cpu.py",
    "triton/runtime/interpreter.py",
)
"""The CPU's kernels, and those that are interpreted, work on the host, where a CPU has its tensors."""


class HostReadsForbidden(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if (name in _READS or _is_masked_index(name, args)) and not _is_called_by_the_cpu_kernel():
            raise AssertionError(f"{name} reads from the device")
        return func(*args, **(kwargs or {}))


def _is_masked_index(name: str, args: tuple[Any, ...]) -> bool:
    if name not in ("__getitem__", "__setitem__"):
        return False
    indices = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(index, torch.Tensor) and index.dtype is torch.bool for index in indices)


def _is_called_by_the_cpu_kernel() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if any(place in frame.f_code.co_filename for place in _CPU_ONLY):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class AllowOdd:
    """Implements `GrammarState`: odd tokens only."""

    error = ""

    def advance(self, token_id: int) -> bool:
        return token_id % 2 == 1

    def fill(self, row: np.ndarray[Any, np.dtype[np.int32]], *, may_end: bool) -> None:
        row[:] = np.int32(-0x55555556)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path)
    return load(path)


def test_launching_steps_of_every_kind_of_request_reads_nothing_back(model: LoadedModel) -> None:
    settings = EngineConfig(model_path=Path("unread"), num_blocks=16, max_model_len=256, max_num_batched_tokens=40)
    harness = EngineHarness(build_engine(model, settings))
    runner = harness.engine.runner
    submit = runner.submit

    def guarded(plan: Plan) -> Any:
        with HostReadsForbidden():
            return submit(plan)

    runner.submit = guarded  # type: ignore[method-assign]
    samplings = [
        SamplingParams(temperature=0),
        SamplingParams(1.0, top_p=0.9, top_k=20, min_p=0.01, seed=1, logprobs=3),
        SamplingParams(0.7, seed=2, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2),
        SamplingParams(0.0, logit_bias={5: 3.0}, allowed_token_ids=range(60), bad_words=[[7], [8, 9]]),
    ]
    for number, sampling in enumerate(samplings):
        harness.add(PROMPT[number : number + 50], 40, sampling, stopping=StoppingParams(40, min_tokens=3))
    harness.add(PROMPT[:30], 30, SamplingParams(1.0, seed=3, logprobs=0), grammar=AllowOdd())
    harness.add(PROMPT[:60], 5, prompt_logprobs=2)
    first = harness.add(PROMPT[:21], 8, SamplingParams(1.0, seed=4))
    harness.add(PROMPT[:21], 8, SamplingParams(1.0, seed=5), choice=1, arrival=6, fork_of=first.request)
    harness.run()
    assert harness.num_preemptions > 0


def test_the_guard_notices_reads() -> None:
    tensor = torch.arange(4)
    reads: list[Callable[[], object]] = [
        tensor.tolist,
        tensor[0].item,
        lambda: bool(tensor[0]),
        lambda: int(tensor[1]),
        lambda: tensor[tensor > 1],
        tensor.nonzero,
        tensor.numpy,
    ]
    for read in reads:
        with HostReadsForbidden(), pytest.raises(AssertionError, match="reads from the device"):
            read()
