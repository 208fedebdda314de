"""A codebook for values that follow a Laplace law, as gradients of one layer roughly do.

λ is the mean magnitude of a block. With b magnitude bits the cells end at E_k = -3λ·ln(1 - k/2^b), the spacing that suits
this law at high resolution, and each is decoded to the mean of the law inside it:
λ + (E_k·e^(-E_k/λ) - E_{k+1}·e^(-E_{k+1}/λ)) / (e^(-E_k/λ) - e^(-E_{k+1}/λ)). One bit more is the sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from thinwire.compressors.shared.blockwise import Blockwise
from thinwire.core.errors import ConfigError
from thinwire.formats.catalog import Width, WireFormat
from thinwire.formats.types import Encoded, store

BLOCK = 256
BITS = (4, 8)


@cache
def codebook(magnitude_bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The inner cell edges and the centroids, for λ = 1."""
    cells = 2**magnitude_bits
    edges = [-3 * math.log(1 - k / cells) for k in range(cells)]
    # What the law holds above an edge: probability e^-E, first moment (E + 1)·e^-E; nothing above infinity.
    above = [(math.exp(-edge), (edge + 1) * math.exp(-edge)) for edge in edges] + [(0.0, 0.0)]
    centroids = [
        (above[k][1] - above[k + 1][1]) / (above[k][0] - above[k + 1][0]) for k in range(cells)
    ]  # conditional means
    return tuple(edges[1:]), tuple(centroids)


@dataclass(frozen=True, kw_only=True)
class LaplaceValues(Blockwise):
    """Averages vectors in this format; λ as bf16 per 256 values.

    Args:
        bits: 4 or 8, the sign included.
    """

    bits: int = 4

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ConfigError(f"laplace: bits is {self.bits}; expected one of {BITS}")

    @property
    def format(self) -> WireFormat:
        return laplace_format(self.bits)


@cache
def laplace_format(bits: int) -> WireFormat:
    """The wire format; it has no error bound, since large values are cut to the last centroid."""

    def encode(x: Tensor, generator: torch.Generator | None) -> Encoded:
        return _encode(x, bits)

    def decode(codes: Tensor, scales: Tensor | None, weight: float, out: Tensor, accumulate: bool) -> None:
        assert scales is not None
        store(_values(_unpacked(codes, bits), scales, bits), weight, out, accumulate)

    return WireFormat(f"laplace{bits}", Width(bits), BLOCK, torch.bfloat16, encode, decode, math.inf)


def _encode(x: Tensor, bits: int) -> Encoded:
    assert x.numel() % BLOCK == 0, f"{x.numel()} values are not whole blocks of {BLOCK}"
    blocks = x.view(-1, BLOCK)
    # In fp64, where the sum of the largest fp32 values is still finite.
    scales = blocks.abs().mean(dim=1, dtype=torch.float64).to(torch.bfloat16)
    usable = scales >= torch.finfo(torch.float32).tiny
    scales = torch.where(usable, scales, 0.0)
    edges = torch.tensor(codebook(bits - 1)[0], device=x.device)
    magnitudes = torch.where(usable[:, None], blocks.abs() / scales[:, None].float(), 0.0)
    codes = torch.bucketize(magnitudes, edges).view(-1).to(torch.uint8) | ((x < 0).to(torch.uint8) << (bits - 1))
    return Encoded(_packed(codes, bits), scales, x - _values(codes, scales, bits))


def _values(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    levels = codebook(bits - 1)[1]
    table = torch.tensor([*levels, *(-level for level in levels)], device=codes.device)
    return (table[codes.long()].view(-1, BLOCK) * scales[:, None].float()).view(-1)


def _packed(codes: Tensor, bits: int) -> Tensor:
    return codes if bits == 8 else codes[0::2] | (codes[1::2] << 4)


def _unpacked(codes: Tensor, bits: int) -> Tensor:
    return codes if bits == 8 else torch.stack([codes & 15, codes >> 4], dim=1).view(-1)
