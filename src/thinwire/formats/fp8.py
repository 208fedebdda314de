"""8-bit floats under a power-of-two block scale: Micikevicius et al., FP8 Formats for Deep Learning (2022)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.formats.blocks import as_blocks, normalised, power_of_two_scales, residual_of
from thinwire.formats.types import Decode, Encode, Encoded, store

BLOCK = 256


class Variant(NamedTuple):
    """How the 7 bits beside the sign are used, and the largest finite value."""

    dtype: torch.dtype
    exponent: int
    mantissa: int
    largest: float


E4M3 = Variant(torch.float8_e4m3fn, 4, 3, 448.0)
E5M2 = Variant(torch.float8_e5m2, 5, 2, 57344.0)
VARIANTS = {"e4m3": E4M3, "e5m2": E5M2}


def coder(variant: Variant) -> tuple[Encode, Decode]:
    """The encoder and decoder of a variant."""

    def encode(x: Tensor, generator: torch.Generator | None) -> Encoded:
        blocks = as_blocks(x, BLOCK)
        scales = power_of_two_scales(blocks.abs().amax(dim=1), variant.largest)
        codes = to_codes(normalised(blocks, scales), variant, generator)
        decoded = values_of(codes, variant).view_as(blocks) * scales[:, None]
        return Encoded(codes.view(-1)[: x.numel()], scales.to(torch.bfloat16), residual_of(x, decoded))

    def decode(codes: Tensor, scales: Tensor | None, weight: float, out: Tensor, accumulate: bool) -> None:
        assert scales is not None
        blocks = as_blocks(values_of(codes, variant), BLOCK)
        store((blocks * scales.float()[:, None]).view(-1)[: out.numel()], weight, out, accumulate)

    return encode, decode


def to_codes(y: Tensor, variant: Variant, generator: torch.Generator | None) -> Tensor:
    """uint8 codes of values within the range of the variant: to nearest even, or to either neighbour at random."""
    if generator is None:
        return y.to(variant.dtype).view(torch.uint8)
    magnitudes = table(variant, y.device)[:128].nan_to_num(nan=torch.inf)
    sizes = y.abs()
    below = torch.bucketize(sizes, magnitudes, right=True) - 1
    low, high = magnitudes[below], magnitudes[below + 1]
    draw = torch.rand(y.shape, generator=generator).to(y.device)
    # Beyond the largest finite value the gap is infinite, so nothing is ever rounded up to infinity.
    codes = below + (draw < (sizes - low) / (high - low))
    return (codes | (torch.signbit(y) << 7)).to(torch.uint8)


def values_of(codes: Tensor, variant: Variant) -> Tensor:
    """What uint8 codes stand for, before scaling. A table: torch's own conversion is ten times slower on CPU."""
    return table(variant, codes.device).index_select(0, codes.reshape(-1).to(torch.int32))


@cache
def table(variant: Variant, device: torch.device) -> Tensor:
    """The values of all 256 codes; some are not finite."""
    return torch.arange(256, dtype=torch.uint8).view(variant.dtype).to(torch.float32).to(device)
