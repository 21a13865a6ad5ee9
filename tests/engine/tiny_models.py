"""Tiny random models of many architectures, made and saved by transformers, and Kvern's answers for them in steps."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvern.engine.config import EngineConfig
from kvern.engine.kv_cache import allocate_kv
from kvern.engine.model.language_model import Forward, LanguageModel
from kvern.engine.model.loader import LoadedModel
from kvern.engine.plan import Plan, PlanEntry
from kvern.engine.request import Request, SamplingParams, StoppingParams
from kvern.engine.runner import ModelRunner
from kvern.kernels.paged_attention import plan_attention

WINDOW = 10
PROMPT = [(11 * position * position + 5 * position + 3) % 113 for position in range(3 * WINDOW)]

_INDEX = "model.safetensors.index.json"
_BLOCK_SIZE = 4
_NUM_BLOCKS = 64
_SHAPE = {
    "vocab_size": 113,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_tiny(path: Path, name: str, *, seed: int = 0, **config: Any) -> Any:
    """Make a random model of transformers' class `name`ForCausalLM and save it, in shards."""
    torch.manual_seed(seed)
    model_class = getattr(transformers, f"{name}ForCausalLM")
    model = model_class(model_class.config_class(**(_SHAPE | config))).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * (0.3 if "norm" in parameter_name else 0.1))
    model.save_pretrained(path, max_shard_size="60KB")
    return model


def edit_shards(path: Path, add: dict[str, torch.Tensor], remove: str = "") -> None:
    """Add tensors to the last shard of a checkpoint, and remove one wherever it is."""
    index = json.loads((path / _INDEX).read_text())
    shard = sorted(set(index["weight_map"].values()))[-1]
    for file in {shard, index["weight_map"].get(remove, shard)}:
        tensors = load_file(path / file) | (add if file == shard else {})
        tensors.pop(remove, None)
        save_file(tensors, path / file, {"format": "pt"})
    weight_map = index["weight_map"] | dict.fromkeys(add, shard)
    weight_map.pop(remove, None)
    (path / _INDEX).write_text(json.dumps(index | {"weight_map": weight_map}))


@torch.inference_mode()
def expected_logits(model: Any, token_ids: list[int] = PROMPT) -> Tensor:
    logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    return logits


def expected_tokens(model: Any, num_tokens: int, prompt: list[int] = PROMPT) -> list[int]:
    """Return greedy tokens, each from a whole forward of transformers'."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(expected_logits(model, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


@torch.inference_mode()
def paged_logits(
    model: LoadedModel,
    chunk: int,
    token_ids: list[int] = PROMPT,
    compiled: Callable[[LanguageModel, Tensor, int], Forward] = lambda module, kv, max_num_tokens: module,
) -> Tensor:
    """Return the logits of all positions, run in chunks beside a sequence of other tokens, over shuffled blocks.

    compiled: returns what computes hidden states; what that returns holds until it is called again.
    """
    kv = allocate_kv(model, _BLOCK_SIZE, _NUM_BLOCKS).fill_(float("nan"))
    forward = compiled(model.module, kv, 2 * chunk)
    table = torch.tensor(random.Random(chunk).sample(range(_NUM_BLOCKS), 60), dtype=torch.int32).view(2, 30)
    rows = torch.stack((torch.tensor(token_ids), torch.tensor(token_ids).flip(0)))
    hidden = []
    for start in range(0, len(token_ids), chunk):
        positions = torch.arange(start, min(start + chunk, len(token_ids)))
        blocks = table[:, positions // _BLOCK_SIZE].long()
        attention = plan_attention(
            kv,
            block_table=table,
            cu_query_lens=torch.tensor([0, len(positions), 2 * len(positions)], dtype=torch.int32),
            context_lens=torch.full((2,), int(positions[-1]) + 1, dtype=torch.int32),
            slot_mapping=(blocks * _BLOCK_SIZE + positions % _BLOCK_SIZE).flatten(),
            sliding_windows=model.config.sliding_windows,
        )
        step = forward(rows[:, positions].flatten(), positions.repeat(2), attention, kv)
        hidden.append(step[: len(positions)].clone())
    return model.module.logits(torch.cat(hidden))


def generate(model: LoadedModel, num_tokens: int, chunk: int, prompt: list[int] = PROMPT) -> list[int]:
    """Return greedy tokens of the runner: the prompt in chunks, beside a request that is some tokens shorter."""
    config = EngineConfig(model_path=model.path, block_size=_BLOCK_SIZE)
    runner = ModelRunner(model, config, _NUM_BLOCKS, max_model_len=128)
    free_blocks = random.Random(chunk).sample(range(_NUM_BLOCKS), _NUM_BLOCKS)
    sampling, stopping = SamplingParams(temperature=0), StoppingParams(num_tokens)
    requests = [
        Request(number, list(tokens), len(tokens), sampling, stopping)
        for number, tokens in enumerate((prompt, prompt[:7:-1]))
    ]
    while requests[0].num_output_tokens < num_tokens:
        entries = []
        for request in requests:
            start = request.num_computed_tokens
            count = min(chunk, request.num_tokens - start)
            while len(request.block_ids) * _BLOCK_SIZE < start + count:
                request.block_ids.append(free_blocks.pop())
            entries.append(PlanEntry(request, start, count, samples=start + count == request.num_tokens))
        for entry, token_id in zip(entries, runner.submit(Plan(entries)).result().token_ids, strict=True):
            entry.request.num_computed_tokens += entry.num_tokens
            if token_id is not None:
                entry.request.token_ids.append(token_id)
    return requests[0].token_ids[len(prompt) :]


def assert_near_in_low_precision(loaded: LoadedModel, model: Any) -> None:
    """Assert that the precision costs Kvern hardly more than transformers, of which `model` is in float32.

    That is, at most positions: where two experts score nearly alike, rounding may choose the other.
    """
    expected = expected_logits(model)
    own = expected_logits(model.to(loaded.dtype))
    differences = ((logits - expected).norm(dim=-1).median() for logits in (paged_logits(loaded, 7), own))
    difference, own_difference = map(float, differences)
    assert difference < 1.5 * own_difference + 1e-3 * float(expected.norm(dim=-1).median())
