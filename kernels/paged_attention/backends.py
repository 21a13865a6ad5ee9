"""Which backend computes attention: chosen by device and type, or by name."""

from __future__ import annotations

from importlib import import_module
from typing import cast

import torch
from torch import Tensor

from kvern.kernels.paged_attention.step import Backend

AUTO = "auto"
_MODULES = {"triton": "triton_backend", "torch": "gathered", "numba": "cpu"}
"""Imported on first use: each needs packages that are not installed everywhere."""

BACKENDS = (AUTO, *_MODULES)


def choose_backend(kv: Tensor, requested: str = AUTO) -> str:
    """Return "triton" on a GPU; on a CPU "numba" for float32 and "torch" for what else there is; or what is requested.

    Raises ValueError for a name that is none, and for what a backend cannot compute.
    """
    if requested not in BACKENDS:
        raise ValueError(f"attention backend {requested!r} is not one of {', '.join(BACKENDS)}")
    on_cpu = kv.device.type == "cpu"
    by_device = "triton" if not on_cpu else "numba" if kv.dtype is torch.float32 else "torch"
    name = by_device if requested == AUTO else requested
    if name == "numba" and by_device != "numba":
        raise ValueError(f"attention backend 'numba' is for float32 on a CPU; kv is {kv.dtype} on {kv.device.type}")
    return name


def load_backend(name: str) -> Backend:
    """Return the backend of a name that `choose_backend` gave."""
    return cast(Backend, import_module(f"kvern.kernels.paged_attention.{_MODULES[name]}"))
