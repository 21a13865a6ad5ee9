"""What a started engine holds, as data and as lines to log."""

from __future__ import annotations

from dataclasses import dataclass

from kvern.engine.config import EngineConfig
from kvern.engine.kv_cache import PoolSize, kv_block_bytes
from kvern.engine.model import LoadedModel


@dataclass(frozen=True, slots=True)
class Capacity:
    """The model in memory, the KV pool beside it, and the settings in force."""

    model_path: str
    architecture: str
    num_parameters: int
    weight_bytes: int
    dtype: str
    device: str
    kv_bytes: int
    block_size: int
    """Tokens."""
    num_blocks: int
    max_model_len: int
    """Tokens, prompt and output together."""
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool

    @classmethod
    def of(cls, model: LoadedModel, config: EngineConfig, pool: PoolSize) -> Capacity:
        return cls(
            model_path=str(model.path),
            architecture=model.config.architecture,
            num_parameters=model.num_parameters,
            weight_bytes=model.weight_bytes,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            kv_bytes=pool.num_blocks * kv_block_bytes(model.config, config.block_size, model.dtype),
            block_size=config.block_size,
            num_blocks=pool.num_blocks,
            max_model_len=pool.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size

    @property
    def num_full_requests(self) -> float:
        """How many requests of max_model_len tokens fit at once."""
        return self.num_blocks / -(-self.max_model_len // self.block_size)

    def lines(self) -> list[str]:
        caching = "on" if self.enable_prefix_caching else "off"
        return [
            f"model {self.model_path} ({self.architecture}, {self.num_parameters / 1e6:,.1f} M parameters)",
            f"weights {_size(self.weight_bytes)} in {self.dtype} on {self.device}",
            f"KV cache {_size(self.kv_bytes)}: {self.num_blocks:,} blocks of {self.block_size} tokens, "
            f"{self.num_tokens:,} tokens, {self.num_full_requests:.1f} requests of {self.max_model_len:,} tokens",
            f"max_model_len {self.max_model_len:,}, max_num_seqs {self.max_num_seqs}, "
            f"max_num_batched_tokens {self.max_num_batched_tokens:,}, prefix caching {caching}",
        ]


def _size(num_bytes: int) -> str:
    """Return bytes as a person reads them: 257 MiB, 5.75 GiB."""
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):,.0f} MiB"
    return f"{num_bytes / (1 << 30):,.2f} GiB"
