"""Errors of the engine, each with a message that a person can act on."""

from __future__ import annotations

import signal


class EngineError(Exception):
    """Base of all errors the engine raises on purpose."""


class ConfigError(EngineError):
    """A setting cannot be honoured. `field` is its name in `EngineConfig`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ModelError(EngineError):
    """The model's files are missing, damaged, or of a kind Kvern cannot run."""


class RankLost(EngineError):
    """One of the processes that share a model has ended."""

    def __init__(self, rank: int, num_ranks: int, returncode: int) -> None:
        """returncode: as of subprocess, negative where a signal ended it."""
        how = f"exited with {returncode}" if returncode >= 0 else f"was killed by {signal.Signals(-returncode).name}"
        super().__init__(f"rank {rank} of {num_ranks} {how}; without its part of the model the engine cannot go on")
        self.rank = rank


class EngineStuck(EngineError):
    """A step does not end, and nothing but a restart will help."""


class RequestRefused(EngineError):
    """A request cannot be run here. `field` is the dotted name of the client's field at fault, or empty."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
