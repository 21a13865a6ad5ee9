"""A Hugging Face directory with safetensors weights, in one file or in shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from kvern.engine.errors import ModelError
from kvern.engine.model import hf_end_tokens
from kvern.engine.model.config import ModelConfig
from kvern.engine.model.hf_config import architecture_of, model_config_of
from kvern.engine.model.json_file import read_json

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

_MIXTRAL = "MixtralForCausalLM"
_MIXTRAL_NAMES = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."}


class SafetensorsCheckpoint:
    """Implements `Checkpoint`. Nothing is read from weights until asked for."""

    def __init__(self, path: Path) -> None:
        if not (path / _CONFIG).exists():
            raise ModelError(f"{path}: no {_CONFIG} in it{_gguf_hint(path)}")
        self.path = path
        self._config = read_json(path / _CONFIG)
        self.architecture = architecture_of(self._config, str(path / _CONFIG))
        self._files: dict[Path, Any] = {}
        self._file_of = self._locate_tensors()
        self.weight_files = sorted(set(self._file_of.values()))
        self._read: set[str] = set()

    def dtype(self) -> str | None:
        """Return what config.json says, or the type of the first tensor."""
        stated = self._config.get("dtype") or self._config.get("torch_dtype")
        if stated is not None:
            return str(stated).removeprefix("torch.")
        name, file = next(iter(self._file_of.items()))
        stored: str = self._open(file).get_slice(name).get_dtype()
        return _DTYPES.get(stored, stored)

    def model_config(self) -> ModelConfig:
        return model_config_of(self._config, str(self.path / _CONFIG))

    def eos_token_ids(self) -> frozenset[int]:
        return hf_end_tokens.eos_token_ids(self.path)

    def __contains__(self, name: str) -> bool:
        return self._own_name(name) in self._file_of

    def tensor(self, name: str) -> Tensor:
        # Imported here: whoever makes up weights does without.
        from safetensors import SafetensorError

        name = self._own_name(name)
        if name not in self._file_of:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        self._read.add(name)
        file = self._file_of[name]
        try:
            tensor: Tensor = self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{file}: tensor {name}: {error}") from error
        return tensor

    def unread(self) -> list[str]:
        return sorted(self._file_of.keys() - self._read)

    def weights_name(self) -> str:
        """Return the name of the index, or of the one weight file where there is none."""
        return _INDEX if (self.path / _INDEX).exists() else self.weight_files[0].name

    def raw_config(self) -> dict[str, Any]:
        """Return config.json as it is."""
        return self._config

    def _own_name(self, name: str) -> str:
        """Return what this checkpoint calls a tensor."""
        if self.architecture == _MIXTRAL:
            for usual, own in _MIXTRAL_NAMES.items():
                name = name.replace(usual, own)
        return name

    def _locate_tensors(self) -> dict[str, Path]:
        """Return the file of each tensor. An index decides; without one there must be one file."""
        if (self.path / _INDEX).exists():
            return self._read_index()
        file = self.path / _SINGLE
        if not file.exists():
            file = self._only_safetensors_file()
        return dict.fromkeys(self._open(file).keys(), file)

    def _read_index(self) -> dict[str, Path]:
        index = self.path / _INDEX
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: no weight_map in it")
        for shard in sorted(set(weight_map.values())):
            if not (self.path / shard).exists():
                raise ModelError(f"{self.path}: shard {shard}, which {_INDEX} names, is missing")
        return {name: self.path / shard for name, shard in weight_map.items()}

    def _only_safetensors_file(self) -> Path:
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{self.path}: no .safetensors file in it; weights in other formats are not read")
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ModelError(f"{self.path}: several weight files ({names}) and no {_INDEX} to say which belong to it")
        return files[0]

    def _open(self, file: Path) -> Any:
        """Open a shard, once. Its tensors are mapped into memory, not read."""
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            try:
                self._files[file] = safe_open(str(file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file}: damaged or not a safetensors file: {error}") from error
        return self._files[file]


def _gguf_hint(path: Path) -> str:
    names = sorted(file.name for file in path.glob("*.gguf"))
    return f"; to run a .gguf file, name the file itself ({', '.join(names)})" if names else ""
