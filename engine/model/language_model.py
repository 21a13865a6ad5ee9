"""What the runner needs of a model, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from kvern.engine.model.ops import LayerOps
from kvern.kernels.paged_attention import AttentionMetadata

Forward = Callable[[Tensor, Tensor, AttentionMetadata, Tensor], Tensor]
"""What computes hidden states, as `LanguageModel.forward` does."""


class LanguageModel(nn.Module):
    """A decoder and its head. Tokens of all sequences lie one after another, without padding."""

    is_capturable = False
    """Whether a CUDA graph can hold it: its work follows from shapes alone."""

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionMetadata, kv: Tensor) -> Tensor:
        """Write the tokens' KV and return their hidden states: [num_tokens, hidden_size].

        token_ids, positions: [num_tokens] int; kv: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        """
        raise NotImplementedError

    def use(self, ops: LayerOps) -> None:
        """Compute with these operations from now on. A model that others compute has none to exchange."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] float32."""
        raise NotImplementedError
