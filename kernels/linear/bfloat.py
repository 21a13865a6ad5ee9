"""Weights in bfloat16 on a CPU that multiplies them (AVX-512 BF16), in the order that the product reads them in."""

from __future__ import annotations

import torch
from torch import Tensor

from kvern.kernels.cpu import num_threads
from kvern.kernels.linear.bfloat_kernel import HAS_BF16, STEP, WIDTH, multiply, multiply_on_one_thread


class BFloatWeight:
    """A bfloat16 weight, pairs of inputs of 32 outputs side by side. Implements `PackedWeight`.

    A token's result has the same bits in every batch.
    """

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes
        pairs = weight.contiguous().view(torch.int32)
        self._weight = pairs.view(self.out_features // WIDTH, WIDTH, -1).transpose(1, 2).contiguous()
        self._address = self._weight.data_ptr()

    @staticmethod
    def can_hold(weight: Tensor) -> bool:
        return HAS_BF16 and weight.shape[0] % WIDTH == 0 and weight.shape[1] % STEP == 0

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        num_tokens, threads = x.shape[0], num_threads()
        out = x.new_empty((num_tokens, self.out_features))
        addresses = 0 if bias is None else bias.data_ptr(), out.data_ptr()
        sizes = self._address, self.in_features, self.out_features
        if threads == 1:
            multiply_on_one_thread(x.data_ptr(), num_tokens, *sizes, *addresses)
        else:
            multiply(x.data_ptr(), num_tokens, *sizes, *addresses, threads)
        return out
