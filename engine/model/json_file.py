"""JSON files beside a model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvern.engine.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file. Raises ModelError where it cannot be read or holds something else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return content


def read_json_if_any(path: Path) -> dict[str, Any]:
    """Return the object in a file, an empty one where there is no such file. Raises ModelError as `read_json` does."""
    return read_json(path) if path.exists() else {}
