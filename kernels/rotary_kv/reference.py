"""The definition of rotation and KV write, one token at a time: what the kernel is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

_FP8_MAX = 448.0


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first half of each head's first rotary_dim dimensions against the second, in float32.

    heads: [num_heads, head_dim]; cos, sin: [1, rotary_dim].
    """
    rotary_dim = cos.shape[-1]
    turned, kept = heads.float()[:, :rotary_dim], heads.float()[:, rotary_dim:]
    swapped = turned.roll(rotary_dim // 2, dims=1)
    return torch.cat((turned * cos.float() + swapped * sin.float(), kept), dim=1)


def rotary_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    kv: Tensor,
    layer: int,
    slot_mapping: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    """Return rotated queries, and store keys and values. Shapes are those of the launcher."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for token, slot in enumerate(slot_mapping.tolist()):
        queries, keys = q[token].float(), k[token].float()
        if rotation is not None:
            cos, sin = rotation[0][token], rotation[1][token]
            queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        out[token] = queries.to(q.dtype)
        if slot >= 0:
            block, offset = divmod(slot, kv.shape[4])
            for part, values in enumerate((keys, v[token].float())):
                stored = values
                if scales is not None:
                    stored = (values / scales[part, layer, :, None]).clamp(-_FP8_MAX, _FP8_MAX).half()
                kv[block, layer, part, :, offset] = stored.to(kv.dtype)
    return out
