"""Kernels over the rows of a message matrix, made from the kernels for one message.

A row holds the codes of its values and behind them their scales. `messages` is uint8 with one row per message; rows may lie
apart in memory. Every row has the same number of values, whole blocks of them. For sets that have nothing faster.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from thinwire.kernels.types import Bits, Quantized

Encode = Callable[[Tensor, Tensor | None, int, Tensor], Quantized]
Decode = Callable[[Tensor, Tensor, int, float, Tensor, bool], None]
CODE_DTYPES: dict[Bits, torch.dtype] = {1: torch.uint8, 2: torch.uint8, 4: torch.uint8, 8: torch.int8}
SCALE_DTYPES: dict[Bits, torch.dtype] = {
    1: torch.bfloat16,
    2: torch.bfloat16,
    4: torch.bfloat16,
    8: torch.float32,
}


def row_bytes(bits: Bits, numel: int, block: int) -> int:
    """Length of a row of ``numel`` values: its codes and its scales."""
    return numel * bits // 8 + numel // block * SCALE_DTYPES[bits].itemsize


class Rows:
    """The row kernels of a set, by bits per value."""

    def __init__(self, encoders: Mapping[Bits, Encode], decoders: Mapping[Bits, Decode]) -> None:
        self._encoders, self._decoders = encoders, decoders

    def encode_rows(
        self, bits: Bits, grad: Tensor, residual: Tensor | None, block: int, messages: Tensor, out: Tensor
    ) -> bool:
        """Each part of `grad + residual` into its row, what was lost into `out`; whether all was finite."""
        coded = self._encoders[bits](grad, residual, block, out)
        codes, scales = (part.view(torch.uint8).view(len(messages), -1) for part in (coded.codes, coded.scales))
        messages[:, : codes.shape[1]], messages[:, codes.shape[1] :] = codes, scales
        return coded.finite

    def decode_rows(self, bits: Bits, messages: Tensor, block: int, out: Tensor) -> None:
        """The values of all rows, one row behind the other."""
        for message, place in zip(messages, out.view(len(messages), -1), strict=True):
            self._decode(bits, message, block, 1.0, place, accumulate=False)

    def sum_rows(self, bits: Bits, messages: Tensor, block: int, weight: float, out: Tensor) -> None:
        """The sum of `weight` times each row, added in the order of the rows."""
        for row, message in enumerate(messages):
            self._decode(bits, message, block, weight, out, accumulate=row > 0)

    def _decode(self, bits: Bits, message: Tensor, block: int, weight: float, out: Tensor, *, accumulate: bool) -> None:
        code_dtype, scale_dtype = CODE_DTYPES[bits], SCALE_DTYPES[bits]
        codes, scales = message.split([out.numel() * bits // 8, out.numel() // block * scale_dtype.itemsize])
        self._decoders[bits](codes.view(code_dtype), scales.view(scale_dtype), block, weight, out, accumulate)
