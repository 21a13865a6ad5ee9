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
    """Return "triton" on a GPU; on a CPU "numba" for what it can compute, else "torch"; or what is requested.

    Raises ValueError for a name that is none, and for what a backend cannot compute.
    """
    if requested not in BACKENDS:
        raise ValueError(f"attention backend {requested!r} is not one of {', '.join(BACKENDS)}")
    on_cpu = kv.device.type == "cpu"
    by_device = "triton" if not on_cpu else "numba" if _is_compiled(kv) else "torch"
    name = by_device if requested == AUTO else requested
    if name == "numba" and by_device != "numba":
        raise ValueError(
            "attention backend 'numba' is for float32, and bfloat16 and float16 in heads of an even size, on a CPU; "
            f"kv is {kv.dtype} in heads of {kv.shape[5]} on {kv.device.type}"
        )
    return name


def _is_compiled(kv: Tensor) -> bool:
    """Whether there is a kernel for a CPU. It reads elements of two bytes in pairs."""
    return kv.dtype is torch.float32 or (kv.dtype in (torch.bfloat16, torch.float16) and kv.shape[5] % 2 == 0)


def load_backend(name: str) -> Backend:
    """Return the backend of a name that `choose_backend` gave."""
    return cast(Backend, import_module(f"kvern.kernels.paged_attention.{_MODULES[name]}"))
