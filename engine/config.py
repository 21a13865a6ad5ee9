"""What the engine is told at start. Parsed once, then frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvern.engine.block_hash import DEFAULT_KEY


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. `None` means: decide from the model and the device.

    Names are vLLM's where the meaning is.
    """

    model_path: Path
    """A Hugging Face directory or a .gguf file, on this machine."""

    dtype: str = "auto"
    """auto, float32, bfloat16 or float16. auto: what the checkpoint says; a GGUF runs in float32 on a CPU."""

    device: str = "auto"
    """auto, cpu or cuda. auto: cuda where there is one."""

    tensor_parallel_size: int = 1
    """Devices that share the model, on this machine. On a CPU: processes."""

    quantization: str | None = None
    """fp8: layers' projections in float8_e4m3fn. int8, int4: in integers, on a CPU. None: as the checkpoint has
    them."""

    kv_cache_dtype: str = "auto"
    """auto or fp8. auto: the type of the activations."""

    attention_backend: str = "auto"
    """One of kernels.paged_attention's. auto: triton on a GPU, on a CPU numba, and torch for KV in fp8."""

    enforce_eager: bool = False
    """Launch a GPU's steps piece by piece, not as CUDA graphs."""

    max_model_len: int | None = None
    """Longest prompt and output together, in tokens. None: what the model was trained for."""

    max_num_seqs: int = 64
    """Most sequences in one step."""

    max_num_batched_tokens: int = 2048
    """Most tokens in one step, prefill and decode together."""

    block_size: int = 16
    """Tokens a KV block."""

    num_blocks: int | None = None
    """KV blocks in the pool. None: sized by `kv_cache_memory`."""

    kv_cache_memory: int | None = None
    """Bytes for KV, on each device. None: sized by `gpu_memory_utilization`."""

    gpu_memory_utilization: float | None = None
    """Share of the device's memory the engine may fill. None: 0.9 on a GPU, 0.25 of what is available on a CPU."""

    scheduling_policy: str = "fcfs"
    """fcfs or priority: whether requests' priorities count."""

    target_step_ms: float | None = None
    """How long a step that generates may take for prompts that arrive, in milliseconds. None: as long as the token
    budget makes it."""

    enable_prefix_caching: bool = True
    """Keep the KV of finished requests for later ones that begin the same."""

    digest_key: bytes = field(default=DEFAULT_KEY, repr=False)
    """What block digests are keyed with, 64 bytes at most. All that share an index must share it."""

    record_cache_events: bool = False
    """Tell what becomes cached and what stops to be, for the index of all replicas. Somebody must take it in."""

    told_salt: str | None = None
    """What becomes cached under this salt is told with its token ids. None: nothing is."""

    num_threads: int | None = None
    """Threads for CPU kernels. None: torch decides."""

    max_threads: int | None = None
    """What torch's decision may not exceed: it counts the machine's cores, of which a container may be allowed few."""
