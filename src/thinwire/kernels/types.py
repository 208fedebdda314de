"""What the kernels return."""

from typing import Literal, NamedTuple

from torch import Tensor

Bits = Literal[1, 2, 4, 8]  # per value, where values share scales
Coarse = Literal[1, 2]  # those of them that share the mean magnitude of their block, not the largest


class Selected(NamedTuple):
    """The entries of a flat unit that are sent, and what stays behind."""

    values: Tensor  # fp32, the compensated values
    indices: Tensor  # int32, positions in the flat unit
    counts: tuple[int, ...]  # entries per segment
    residual: Tensor  # fp32, the compensated unit with the sent entries set to zero
    finite: bool  # False when the compensated unit holds a NaN or an infinity


class Quantized(NamedTuple):
    """A flat unit as small integers with one scale per block, and the rounding error."""

    codes: Tensor  # 8 bits: int8, one per value; fewer: uint8, several per byte, the first in its lowest bits
    scales: Tensor  # 8 bits: fp32; fewer: bf16; one per block
    residual: Tensor  # fp32, the compensated unit minus what the codes decode to
    finite: bool  # False when the compensated unit holds a NaN or an infinity
