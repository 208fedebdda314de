"""int2 and int1: levels around the mean magnitude of a block, where a grid up to the largest would round most to zero."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.formats.types import Decode, Encode, Encoded
from thinwire.kernels import Coarse

BLOCK = 64


def coder(bits: Coarse) -> tuple[Encode, Decode]:
    """The encoder and decoder of this many bits per value."""
    return partial(_encode, bits), partial(_decode, bits)


def _encode(bits: Coarse, x: Tensor, generator: torch.Generator | None) -> Encoded:
    quantized = kernels.coarse_encode(x, None, bits=bits, block=BLOCK, out=x)
    return Encoded(quantized.codes, quantized.scales, quantized.residual)


def _decode(bits: Coarse, codes: Tensor, scales: Tensor | None, weight: float, out: Tensor, accumulate: bool) -> None:
    assert scales is not None
    kernels.coarse_decode(
        codes, scales, out.numel(), bits=bits, block=BLOCK, weight=weight, out=out, accumulate=accumulate
    )
