"""Token masks as engines launch them: what differs in what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.launch_case import LaunchCase
from kvern.kernels.token_mask import apply_token_mask


def cases() -> Iterator[LaunchCase]:
    """Vocabularies of Llama 3 and, odd, of GPT-2."""
    for vocab_size in (128_256, 50_257):
        yield LaunchCase(f"{vocab_size} tokens", torch.float32, partial(_launch, vocab_size=vocab_size))


def _launch(device: torch.device, *, vocab_size: int) -> None:
    apply_token_mask(
        torch.zeros(16, vocab_size, device=device),
        torch.zeros(16, dtype=torch.int64, device=device),
        torch.zeros(16, -(-vocab_size // 32), dtype=torch.int32, device=device),
    )
