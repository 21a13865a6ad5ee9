"""Log-probabilities of tokens under the model's own distribution: no temperature, no mask, no penalty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvern.engine.plan import TokenLogprobs


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Log-probabilities of some rows' tokens, on the logits' device."""

    logprobs: Tensor
    """[num_rows] float32. NaN where the row's logits are not finite numbers."""
    ranks: Tensor
    """[num_rows] int64."""
    top_ids: Tensor
    """[num_with_top, num_top] int64: the first rows' most likely tokens, in order."""
    top_logprobs: Tensor
    """[num_with_top, num_top] float32."""

    def copied(self, copy: Callable[[Tensor], Tensor]) -> DeviceLogprobs:
        """Return what `copy` makes of the numbers."""
        return DeviceLogprobs(copy(self.logprobs), copy(self.ranks), copy(self.top_ids), copy(self.top_logprobs))

    def on_host(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """Return the numbers, which have come. num_top: how many alternatives of each row to keep."""
        ids, logprobs = self.top_ids.tolist(), self.top_logprobs.tolist()
        tops = [(ids[row][:count], logprobs[row][:count]) if count else ((), ()) for row, count in enumerate(num_top)]
        rows = zip(self.logprobs.tolist(), self.ranks.tolist(), tops, strict=True)
        return [TokenLogprobs(logprob, rank, *top) for logprob, rank, top in rows]


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> DeviceLogprobs:
    """Look up one token a row. logits: [num_rows, vocab_size] float32; token_ids: [num_rows] int64.

    num_top: how many of the most likely tokens each row wants, most first. Of equal logits the lowest id comes first.
    The numbers of a row do not depend on other rows, nor on how many alternatives anybody wants.
    """
    num_with_top = sum(count > 0 for count in num_top)
    logprobs = torch.log_softmax(logits, dim=-1)
    top_ids = _most_likely(logits[:num_with_top], min(max(num_top, default=0), logits.shape[1]))
    return DeviceLogprobs(
        logprobs=logprobs.gather(1, token_ids[:, None])[:, 0],
        ranks=_ranks(logits, token_ids),
        top_ids=top_ids,
        top_logprobs=logprobs[:num_with_top].gather(1, top_ids),
    )


def _ranks(logits: Tensor, token_ids: Tensor) -> Tensor:
    own = logits.gather(1, token_ids[:, None])
    is_lower_id = torch.arange(logits.shape[1], device=logits.device) < token_ids[:, None]
    return 1 + torch.count_nonzero((logits > own) | ((logits == own) & is_lower_id), dim=-1)


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """Return each row's `count` greatest, [num_rows, count] int64. topk leaves open which of equal ones it takes."""
    if not count:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    values, ids = logits.topk(count, dim=-1)
    edge = values[:, -1:]
    every_id = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    at_edge = torch.where(logits == edge, every_id, logits.shape[1]).topk(count, dim=-1, largest=False).values.long()
    num_above = (values > edge).sum(dim=-1, keepdim=True)
    places = torch.arange(count, device=logits.device)
    ids = torch.where(places < num_above, ids, at_edge.gather(1, (places - num_above).clamp(min=0)))
    ids = ids.clamp(max=logits.shape[1] - 1)  # for rows of NaN, which equals nothing
    # By id, then by value without changing the order of equal ones.
    ids = ids.sort(dim=-1).values
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)
