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
    quantization: str | None = None
    """fp8: layers' projections are in it, and the rest of the weights in dtype."""
    kv_dtype: str | None = None
    """None: as dtype."""
    num_ranks: int = 1
    """Devices that share the model. Parameters and bytes are those of the first one."""
    attention_backend: str | None = None
    """None: there is no runner."""
    num_graphs: int = 0
    """CUDA graphs of steps."""
    capture_s: float = 0.0
    """What making them took."""

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
            *self._runner_lines(),
        ]

    def _runner_lines(self) -> list[str]:
        if self.attention_backend is None:
            return []
        graphs = f"{self.num_graphs} CUDA graphs captured in {self.capture_s:.1f} s"
        launching = graphs if self.num_graphs else "steps launched piece by piece"
        return [f"attention backend {self.attention_backend}, {launching}"]

    def memory_lines(self) -> list[str]:
        """Return what takes how much, without the settings."""
        weights = self.dtype if self.quantization is None else f"{self.quantization} and {self.dtype}"
        kv = f"{readable_bytes(self.kv_bytes)} in {self.kv_dtype or self.dtype}"
        return [
            f"model {self.model_path} ({self.architecture}, {self.num_parameters / 1e6:,.1f} M parameters)",
            f"weights {readable_bytes(self.weight_bytes)} in {weights} on {self.device}{self._sharing()}",
            f"KV cache {kv}: {self.num_blocks:,} blocks of {self.block_size} tokens, "
            f"{self.num_tokens:,} tokens, {self.num_full_requests:.1f} requests of {self.max_model_len:,} tokens",
        ]

    def _sharing(self) -> str:
        return "" if self.num_ranks == 1 else f", rank 0 of {self.num_ranks} that hold as much each"


def readable_bytes(num_bytes: int) -> str:
    """Return bytes as a person reads them: 257 MiB, 5.75 GiB."""
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):,.0f} MiB"
    return f"{num_bytes / (1 << 30):,.2f} GiB"
