"""A .gguf file as a checkpoint: its tensors by Hugging Face's names, in the order that these mean."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
from torch import Tensor

from kvern.engine.errors import ModelError
from kvern.engine.model.config import ModelConfig
from kvern.engine.model.gguf_config import arch_of, model_config_of
from kvern.engine.model.gguf_file import GGUFFile

_PERMUTED_ARCHS = ("llama", "smollm3")
_ROTATED = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")
_EOS_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")


class GGUFCheckpoint:
    """Implements `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weight_files = [path]
        self._file = GGUFFile(path)
        self._arch = arch_of(self._file)
        self._config = model_config_of(self._file)
        self.architecture = self._config.architecture
        self._gguf_names = _names(self._arch, self._config.num_layers)
        # llama.cpp stacks experts since April 2024; in files from before, each has tensors of its own.
        self._has_stacked_experts = "blk.0.ffn_down.0.weight" not in self._file

    def dtype(self) -> str | None:
        return None

    def model_config(self) -> ModelConfig:
        return self._config

    def eos_token_ids(self) -> frozenset[int]:
        return self._file.token_ids(_EOS_FIELDS)

    def __contains__(self, name: str) -> bool:
        return self._locate(name)[0] in self._file

    def tensor(self, name: str) -> Tensor:
        gguf_name, expert = self._locate(name)
        if expert is not None:
            self._check_num_experts(gguf_name)
        weights = self._file.dequantize(gguf_name, expert)
        if self._arch in _PERMUTED_ARCHS and gguf_name.endswith(_ROTATED):
            is_query = ".attn_q." in gguf_name
            weights = _unpermuted(weights, self._config.num_heads if is_query else self._config.num_kv_heads)
        if self._config.unit_offset_norms and gguf_name.endswith("norm.weight"):
            # llama.cpp adds the 1 when it converts a Gemma.
            weights = weights - 1
        return weights

    def unread(self) -> list[str]:
        return self._file.unread()

    def _locate(self, name: str) -> tuple[str, int | None]:
        """Return which tensor of the file is meant, and which expert's part of it where experts are stacked."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return self._gguf_name(name), None
        stacked = self._gguf_name(match[1] + match[3])
        if self._has_stacked_experts:
            return stacked, int(match[2])
        return stacked.replace("_exps.", f".{match[2]}."), None

    def _gguf_name(self, name: str) -> str:
        gguf_name: str = self._gguf_names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        return gguf_name

    def _check_num_experts(self, gguf_name: str) -> None:
        assert self._config.experts is not None
        stored, stated = self._file.shape(gguf_name)[0], self._config.experts.num_experts
        if stored != stated:
            raise ModelError(
                f"{self.path}: tensor {gguf_name} holds {stored} experts; {self._arch}.expert_count is {stated}"
            )


def _names(arch: str, num_layers: int) -> Any:
    """Return the library's map from Hugging Face's names to GGUF's."""
    keys = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(keys[arch], num_layers)


def _unpermuted(weights: Tensor, num_heads: int) -> Tensor:
    """Return query or key rows in the order in which a head's halves are rotated against each other.

    llama.cpp interleaves the two halves of each head when it converts a Llama, for it rotates neighbours.
    """
    half = weights.shape[0] // num_heads // 2
    pairs = weights.reshape(num_heads, half, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)
