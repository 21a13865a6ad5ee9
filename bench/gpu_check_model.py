"""Models of random weights, and an engine that runs them as its service does: on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from kvern.engine.config import EngineConfig
from kvern.engine.core import Add, Command, Output, Refused, Stop
from kvern.engine.model.causal_lm import CausalLM
from kvern.engine.model.config import ModelConfig, RopeConfig
from kvern.engine.model.loader import LoadedModel
from kvern.engine.plan import StepResult
from kvern.engine.request import Request, SamplingParams, StoppingParams
from kvern.engine.startup import Engine, build_engine
from kvern.engine.summary import Capacity

_PATH = Path("random")
_RESULT_TIMEOUT_S = 60.0


def llama_shape(
    *,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    max_position_embeddings: int,
) -> ModelConfig:
    """Return a model in Llama's form."""
    rope = RopeConfig(theta=500_000.0, rotary_dim=head_dim)
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        sliding_windows=(None,) * num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        rms_norm_eps=1e-5,
        ropes=(rope,) * num_layers,
        attention_scale=head_dim**-0.5,
        tie_word_embeddings=False,
    )


@torch.inference_mode()
def random_model(shape: ModelConfig, dtype: torch.dtype, device: torch.device, spread: float) -> LoadedModel:
    """Return a model whose weights are normally distributed, norms excepted. spread: their standard deviation."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            module = CausalLM(shape)
    finally:
        torch.set_default_dtype(default)
    torch.manual_seed(0)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, spread)
    return LoadedModel(
        module=module,
        config=shape,
        path=_PATH,
        dtype=dtype,
        device=device,
        eos_token_ids=frozenset(),
        fingerprint="00",
        quantization=None,
        kv_dtype=dtype,
        kv_scales=None,
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
    )


def make_request(request_id: int, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams) -> Request:
    return Request(
        request_id,
        list(prompt),
        len(prompt),
        sampling,
        StoppingParams(max_tokens, ignore_eos=True),
        arrival=request_id,
    )


class RunningEngine:
    """An engine built and run on its own thread. `results` yields what it emits."""

    def __init__(self, model: LoadedModel, **options: Any) -> None:
        """options: of EngineConfig."""
        self._outputs: SimpleQueue[Output | BaseException] = SimpleQueue()
        self._built: SimpleQueue[Engine | BaseException] = SimpleQueue()
        config = EngineConfig(_PATH, **options)
        self._thread = threading.Thread(target=self._run, args=(lambda: build_engine(model, config),), daemon=True)
        self._thread.start()
        built = self._built.get()
        if isinstance(built, BaseException):
            raise built
        self._engine = built

    @property
    def capacity(self) -> Capacity:
        return self._engine.capacity

    def send(self, command: Command) -> None:
        self._engine.core.send(command)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.send(Add(request))

    def results(self) -> Iterator[StepResult]:
        """Wait for results, without end. Raises what ended the engine's thread, and RuntimeError for a refusal."""
        while True:
            output = self._outputs.get(timeout=_RESULT_TIMEOUT_S)
            if isinstance(output, BaseException):
                raise output
            if isinstance(output, Refused):
                raise RuntimeError(f"request {output.request_id} was refused: {output.message}")
            yield output

    def close(self) -> None:
        """End the engine, and free its memory."""
        self.send(Stop())
        self._thread.join()
        del self._engine
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _run(self, build: Callable[[], Engine]) -> None:
        try:
            engine = build()
        except BaseException as error:
            self._built.put(error)
            return
        self._built.put(engine)
        try:
            engine.core.run(self._outputs.put)
        except BaseException as error:
            self._outputs.put(error)
