"""Whether Kvern runs on a GPU: said at start, with the reason, not at some request."""

from __future__ import annotations

import torch

from kvern.engine.errors import ConfigError
from kvern.kernels.paged_attention.configurations import decode_configuration, prefill_configuration


def check_gpu(device: torch.device, kv_dtype: torch.dtype, head_dim: int) -> None:
    """Raise ConfigError where the GPU is too old for the kernels, or they have no configuration for the heads."""
    check_kernels(torch.cuda.get_device_capability(device), kv_dtype.itemsize, head_dim)


def check_kernels(capability: tuple[int, int], kv_element_bytes: int, head_dim: int) -> None:
    """As `check_gpu`, for a compute capability."""
    architecture = 10 * capability[0] + capability[1]
    if architecture < 80:
        raise ConfigError("device", f"the GPU's compute capability is {architecture / 10}; 8.0 is the least")
    for configuration in (decode_configuration, prefill_configuration):
        try:
            configuration(architecture, kv_element_bytes, head_dim)
        except ValueError as error:
            raise ConfigError("attention_backend", str(error)) from error


def check_driver() -> None:
    """Raise ConfigError where there is a GPU that torch cannot use because its driver is too old."""
    find_version = getattr(torch._C, "_cuda_getDriverVersion", None)  # torch has it where it was built for CUDA
    if find_version is not None and torch.version.cuda is not None:
        check_driver_version(find_version(), torch.version.cuda)


def check_driver_version(driver: int, runtime: str) -> None:
    """driver: the newest CUDA it supports, as 12040 for 12.4, 0 where there is none; runtime: as "12.8".

    A driver serves all CUDA versions of its major one.
    """
    major = driver // 1000
    if driver and major < int(runtime.split(".")[0]):
        supported = f"{major}.{driver % 1000 // 10}"
        raise ConfigError("device", f"the GPU's driver supports CUDA up to {supported}; this torch needs {runtime}")
