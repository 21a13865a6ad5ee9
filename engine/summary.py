"""What a started engine holds, as data and as lines to log."""

from __future__ import annotations

from dataclasses import dataclass


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
            *self.memory_lines(),
            f"max_model_len {self.max_model_len:,}, max_num_seqs {self.max_num_seqs}, "
            f"max_num_batched_tokens {self.max_num_batched_tokens:,}, prefix caching {caching}",
        ]

    def memory_lines(self) -> list[str]:
        """Return what takes how much, without the settings."""
        return [
            f"model {self.model_path} ({self.architecture}, {self.num_parameters / 1e6:,.1f} M parameters)",
            f"weights {readable_bytes(self.weight_bytes)} in {self.dtype} on {self.device}",
            f"KV cache {readable_bytes(self.kv_bytes)}: {self.num_blocks:,} blocks of {self.block_size} tokens, "
            f"{self.num_tokens:,} tokens, {self.num_full_requests:.1f} requests of {self.max_model_len:,} tokens",
        ]


def readable_bytes(num_bytes: int) -> str:
    """Return bytes as a person reads them: 257 MiB, 5.75 GiB."""
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):,.0f} MiB"
    return f"{num_bytes / (1 << 30):,.2f} GiB"
