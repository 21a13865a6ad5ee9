"""Products with weights in groups of integers, on a CPU. The weights are never unpacked in memory."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvern.kernels.cpu import Argument, Operation, run
from kvern.kernels.linear.groups import Groups
from kvern.kernels.linear.integer_kernel import WIDTH, can_multiply, multiply


class IntegerWeight:
    """A weight in 8 or 4 bits. Implements `PackedWeight`.

    A token's result has the same bits in every batch. Activations are multiplied in float32 where they are not in
    bfloat16, or the CPU does not multiply that.
    """

    def __init__(self, groups: Groups) -> None:
        self.out_features = len(groups.values)
        self.in_features = groups.values[0].numel()
        self._width = -(-self.out_features // WIDTH) * WIDTH
        values = _in_blocks(groups.values.flatten(1))
        self._values = _bytes(values) if groups.minima is None else _nibbles(values)
        self._bits = 8 if groups.minima is None else 4
        self._scales = _factors(groups.scales)
        self._minima = np.empty(0, np.uint16) if groups.minima is None else _factors(groups.minima)

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._scales.nbytes + self._minima.nbytes

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if not can_multiply(x.dtype):
            return self.product(x.to(torch.float32), bias).to(x.dtype)
        x, out = x.contiguous(), torch.empty(len(x), self._width, dtype=x.dtype)
        run(self._operation(x.data_ptr(), len(x), x.dtype, out.data_ptr()), torch.get_num_threads())
        if self._width > self.out_features:
            out = out[:, : self.out_features].contiguous()
        return out if bias is None else out + bias

    def operation(self, x: Argument, num_tokens: Argument, bias: Tensor | None, out: Argument) -> Operation | None:
        if bias is not None or self._width > self.out_features or not can_multiply(torch.bfloat16):
            return None
        return self._operation(x, num_tokens, torch.bfloat16, out)

    def _operation(self, x: Argument, num_tokens: Argument, dtype: torch.dtype, out: Argument) -> Operation:
        minima = self._minima.ctypes.data if len(self._minima) else 0
        weight = self._values.ctypes.data, self._scales.ctypes.data, minima
        return Operation(multiply(self._bits, dtype), (x, num_tokens, *weight, out, self.in_features, self._width))


def _in_blocks(rows: Tensor) -> Tensor:
    """Return [num_blocks, WIDTH, ...], filled up with zeros. rows: [out, ...]."""
    missing = -len(rows) % WIDTH
    filled = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows
    return filled.reshape(len(filled) // WIDTH, WIDTH, *rows.shape[1:])


def _bytes(blocks: Tensor) -> NDArray[np.uint8]:
    """Order [num_blocks, WIDTH, in] by block, pair of inputs, and runs of four outputs of two registers in turn.

    These are bytes of a sign and seven bits of magnitude.
    """
    signed = blocks.abs() | (blocks & -128)
    pairs = signed.view(len(blocks), 2, 2, 4, 4, -1, 2).permute(0, 5, 1, 3, 2, 4, 6)
    flat: NDArray[np.uint8] = pairs.reshape(-1).view(torch.uint8).numpy()
    return flat


def _nibbles(blocks: Tensor) -> NDArray[np.uint16]:
    """Order [num_blocks, WIDTH, in] by block, eight inputs, output, and whether an input is even or odd.

    These are words of four inputs, from the lowest nibble on.
    """
    words = blocks.view(len(blocks), WIDTH, -1, 4, 2).transpose(1, 2).numpy().astype(np.uint16)
    low, second, third, high = (words[:, :, :, place] << np.uint16(4 * place) for place in range(4))
    return np.ascontiguousarray(low | second | third | high).reshape(-1)


def _factors(factors: Tensor) -> NDArray[np.uint16]:
    """Order [out, num_groups, 1] by block, group and output, as the bits of float16."""
    ordered = _in_blocks(factors.squeeze(2)).transpose(1, 2).contiguous()
    flat: NDArray[np.uint16] = ordered.view(torch.uint16).reshape(-1).numpy()
    return flat
