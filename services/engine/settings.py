"""Settings of the engine service. Flags that mean what vLLM's mean carry vLLM's names."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field, ValidationInfo, field_validator

from kvern.engine.block_hash import DEFAULT_KEY
from kvern.engine.config import EngineConfig
from kvern.services.runtime.certificates import redis_certificate_files
from kvern.services.runtime.cores import usable_cores
from kvern.services.runtime.model_source import DEFAULT_MODEL
from kvern.services.runtime.secret_file import read_digest_key
from kvern.services.runtime.settings import RedisPasswordFile, RedisUrl, ServiceSettings
from kvern.services.runtime.validate import MAX_NAME_CHARS


class EngineSettings(ServiceSettings):
    """Kvern's engine: runs token ids through a model."""

    model: str = DEFAULT_MODEL
    """A folder, a .gguf file, a hub id (owner/name), or smollm2."""

    served_model_name: str | None = Field(None, min_length=1)
    """What clients call the model. Default: the hub id, or the file's or folder's name."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights, activations and KV. auto: the checkpoint's; a GGUF runs in float32 on a CPU."""

    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs of this machine that share the model, or processes on a CPU. Each must get as many heads as the others."""

    quantization: Literal["fp8", "int8", "int4"] | None = None
    """Layers' projections in fewer bits, rounded as they are loaded. fp8 needs a GPU of compute capability 9.0 or
    higher, or on a CPU patience. int8 and int4 are for a CPU. Default: as the checkpoint has them."""

    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of KV. fp8 holds twice the tokens of 16 bits, on a GPU as above. auto: as the activations."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""

    attention_backend: Literal["auto", "triton", "torch", "numba"] = "auto"
    """auto: triton on a GPU; on a CPU numba, and torch for KV in fp8."""

    enforce_eager: bool = False
    """Launch a GPU's steps piece by piece, not as CUDA graphs: to compare, or where memory for graphs lacks."""

    max_model_len: int | None = Field(None, ge=2)
    """Longest prompt and output together, in tokens. Default: what the model was trained for."""

    max_num_seqs: int = Field(64, ge=1)
    """Most sequences in one step."""

    max_num_batched_tokens: int = Field(2048, ge=1)
    """Most tokens in one step, prefill and decode together."""

    block_size: int = Field(16, ge=1, le=256)
    """Tokens a KV block."""

    num_blocks: int | None = Field(None, ge=1)
    """KV blocks in the pool, fixed by hand. Default: as many as the KV memory holds."""

    kv_cache_memory: ByteSize | None = Field(None, gt=0)
    """Bytes for KV on each device, with a suffix if you like: 512MiB, 4GiB."""

    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of the device's memory to fill. Default: 0.9 on a GPU, 0.25 of what is available on a CPU."""

    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """priority: requests of a lower priority value run first."""

    target_step_ms: float | None = Field(None, gt=0)
    """Milliseconds a step that generates should take at most: prompts are cut smaller then. Default: no target."""

    enable_prefix_caching: bool = True
    """Keep the KV of finished requests for later ones that begin the same."""

    num_threads: int | None = Field(None, ge=1)
    """Threads for CPU kernels. Default: torch decides, within a container's limit."""

    seed: int = Field(0, ge=0, lt=2**64)
    """Seeds the draws of requests that bring no seed."""

    redis: RedisUrl | None = None
    """URL of the Redis with the prefix index and the registry of replicas: redis://, rediss://, unix://,
    redis+sentinel:// or redis+cluster://. Default: none, and routers must be told of this replica."""

    redis_password_file: RedisPasswordFile = None
    """File with the password for redis, of the user that the URL names. It is read again when it changes. Default: the
    URL has it, or there is none."""

    advertise: str | None = Field(None, min_length=1, validate_default=True)
    """Address of this replica's front door (its detokenizer) as routers reach it. Needed with redis."""

    replica_id: str | None = Field(None, pattern=r"^[^{}]+$")
    """Name in the registry, which a restart keeps and no other replica has. Default: the advertised address."""

    digest_key_file: Path | None = None
    """File with a secret of at least 32 bytes, by which digests of cached blocks are keyed. The same for the tokenizers
    and all engines of a deployment; needed where routers know tenants. Default: a key that everybody knows."""

    vllm_metrics: bool = True
    """Tell metrics under vLLM's names too, for dashboards and schedulers that read those."""

    smg_kv_events: bool = False
    """Keep the token ids of cached blocks, and tell them to the detokenizer for gateways that route by them."""

    smg_salt: str = Field("", max_length=MAX_NAME_CHARS)
    """Cache salt of the blocks that are told: what the detokenizer gives the requests of its SMG door."""

    @property
    def certificate_files(self) -> list[str]:
        return [*super().certificate_files, *redis_certificate_files(self.redis)]

    @field_validator("advertise")
    @classmethod
    def _needed_with_redis(cls, advertise: str | None, info: ValidationInfo) -> str | None:
        if advertise is None and info.data.get("redis") is not None:
            raise ValueError("must be given with redis: routers learn the replica's address by it")
        return advertise

    def engine_config(self, model_path: Path) -> EngineConfig:
        """Raises SettingsError where the digest key cannot be read."""
        return EngineConfig(
            model_path=model_path,
            dtype=self.dtype,
            device=self.device,
            tensor_parallel_size=self.tensor_parallel_size,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            attention_backend=self.attention_backend,
            enforce_eager=self.enforce_eager,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            kv_cache_memory=self.kv_cache_memory,
            gpu_memory_utilization=self.gpu_memory_utilization,
            scheduling_policy=self.scheduling_policy,
            target_step_ms=self.target_step_ms,
            enable_prefix_caching=self.enable_prefix_caching,
            digest_key=DEFAULT_KEY if self.digest_key_file is None else read_digest_key(self.digest_key_file),
            record_cache_events=self.redis is not None or self.smg_kv_events,
            told_salt=self.smg_salt if self.smg_kv_events else None,
            num_threads=self.num_threads,
            max_threads=usable_cores(),
        )
