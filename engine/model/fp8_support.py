"""Whether a device can compute in fp8."""

from __future__ import annotations

import logging

import torch

from kvern.engine.errors import ConfigError

logger = logging.getLogger(__name__)

_LEAST_CAPABILITY = (9, 0)


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return a GPU's compute capability, None of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def check_fp8(field: str, capability: tuple[int, int] | None) -> None:
    """Raise ConfigError for `field` where a GPU has no fp8. A CPU computes it slowly, and a warning says so."""
    if capability is None:
        logger.warning("%s: fp8 on a CPU is slower than what it replaces: it is for tests and for measuring", field)
    elif capability < _LEAST_CAPABILITY:
        major, minor = capability
        raise ConfigError(field, f"fp8 needs a GPU of compute capability 9.0 or higher; this one has {major}.{minor}")
