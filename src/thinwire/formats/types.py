"""What encoders return, and what all decoders do last."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Encoded(NamedTuple):
    """Codes as bytes, one scale per block (None where there are none), and the rounding error."""

    codes: Tensor
    scales: Tensor | None
    residual: Tensor


class Encode(Protocol):
    """Flat fp32 values as codes, scales and error; with a generator, rounded at random."""

    def __call__(self, x: Tensor, generator: torch.Generator | None) -> Encoded: ...


class Decode(Protocol):
    """Writes ``weight`` × the decoded values into ``out``, or adds them."""

    def __call__(self, codes: Tensor, scales: Tensor | None, weight: float, out: Tensor, accumulate: bool) -> None: ...


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor as uint8."""
    return tensor.contiguous().view(torch.uint8)


def store(values: Tensor, weight: float, out: Tensor, accumulate: bool) -> None:
    """Write ``weight * values`` to ``out``, or add it."""
    scaled = values if weight == 1.0 else values * weight
    if accumulate:
        out.add_(scaled)
    else:
        out.copy_(scaled)
