"""4-bit grids under block scales, after Guo et al., ANT: Exploiting Adaptive Numerical Data Type (MICRO'22).

A code is a sign and the number of one of eight magnitudes. Gradients are signed, so flint is built on the three bits that
are left (the paper's list 0-8, 10, 12, 14, 16, 24, 32, 64 is the one for four bits without sign).

Rounding is to nearest, ties away from zero. All midpoints have few significant bits, so the upper 16 bits of a value
decide: encoding is one look-up, and decoding is one look-up for two values.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.formats.blocks import as_blocks, bf16_scales_above, normalised, residual_of
from thinwire.formats.types import Decode, Encode, Encoded, store

BLOCK = 64
GRIDS: dict[str, tuple[float, ...]] = {
    "int4": (0, 1, 2, 3, 4, 5, 6, 7),
    "float4": (0, 0.5, 1, 1.5, 2, 3, 4, 6),
    "pot4": (0, 1, 2, 4, 8, 16, 32, 64),
    "flint4": (0, 1, 2, 3, 4, 6, 8, 16),
}
GRID_NAMES = tuple(GRIDS)
_UPPER_HALVES = 1 << 15  # how many the upper 16 bits of a positive fp32 value can be
_BYTES = 256


def error_bound(name: str) -> float:
    """Half the widest gap, as a fraction of the largest magnitude."""
    levels = GRIDS[name]
    return max(high - low for low, high in pairwise(levels)) / 2 / levels[-1] * (1 + 2**-7)


def coder(name: str) -> tuple[Encode, Decode]:
    """The encoder and decoder of one grid, without clipping."""
    number = torch.tensor([GRID_NAMES.index(name)])

    def encode(x: Tensor, generator: torch.Generator | None) -> Encoded:
        return encode_mixed(x, number.to(x.device), torch.ones(1, device=x.device), generator)

    def decode(codes: Tensor, scales: Tensor | None, weight: float, out: Tensor, accumulate: bool) -> None:
        assert scales is not None
        decode_mixed(codes, scales, number.to(codes.device), weight, out, accumulate)

    return encode, decode


def encode_mixed(x: Tensor, grid: Tensor, clip: Tensor, generator: torch.Generator | None = None) -> Encoded:
    """Encode every block on a grid of its own.

    Args:
        grid: per block (or one for all), its position in ``GRID_NAMES``.
        clip: per block (or one for all), the fraction of the largest magnitude that the grid reaches.
    """
    blocks = as_blocks(x, BLOCK)
    largest = torch.tensor([levels[-1] for levels in GRIDS.values()], device=x.device)[grid]
    scales = bf16_scales_above(blocks.abs().amax(dim=1) * (clip / largest))
    codes = _codes(normalised(blocks, scales), grid, generator)
    decoded = _values(codes, grid) * scales[:, None]
    return Encoded(codes[: -(-x.numel() // 2)], scales.to(torch.bfloat16), residual_of(x, decoded))


def decode_mixed(codes: Tensor, scales: Tensor, grid: Tensor, weight: float, out: Tensor, accumulate: bool) -> None:
    """Decode what ``encode_mixed`` encoded; ``grid`` as there."""
    padded = torch.nn.functional.pad(codes, (0, -codes.numel() % (BLOCK // 2)))
    decoded = _values(padded, grid) * scales.float()[:, None]
    store(decoded.view(-1)[: out.numel()], weight, out, accumulate)


def _codes(y: Tensor, grid: Tensor, generator: torch.Generator | None) -> Tensor:
    """Bytes of two codes each, the first in the lower half."""
    bits = y.view(torch.int32)
    keys = (bits >> 16).bitwise_and_(0x7FFF).add_((grid * _UPPER_HALVES).to(torch.int32)[:, None])
    nearest, below = _encode_tables(y.device)
    if generator is None:
        chosen = nearest.index_select(0, keys.view(-1)).view_as(y)
    else:
        chosen = _up_at_random(y.abs(), below.index_select(0, keys.view(-1)).view_as(y), grid, generator)
    nibbles = chosen.bitwise_or_((bits >> 28).bitwise_and_(8).to(torch.uint8))
    pairs = nibbles.view(-1).view(torch.int16)
    return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)


def _up_at_random(sizes: Tensor, below: Tensor, grid: Tensor, generator: torch.Generator) -> Tensor:
    """Each number or the next one, with the probability that keeps the mean."""
    levels = torch.tensor([(*levels, torch.inf) for levels in GRIDS.values()], device=sizes.device)
    rows = levels[grid].expand(sizes.shape[0], -1)
    low, high = rows.gather(1, below.long()), rows.gather(1, below.long() + 1)
    draw = torch.rand(sizes.shape, generator=generator).to(sizes.device)
    return below + (draw < (sizes - low) / (high - low)).to(torch.uint8)


def _values(codes: Tensor, grid: Tensor) -> Tensor:
    """What bytes of two codes each stand for, in rows of one block."""
    keys = codes.to(torch.int32).view(-1, BLOCK // 2) + (grid * _BYTES).to(torch.int32)[:, None]
    pairs = _decode_table(codes.device).index_select(0, keys.view(-1))
    return pairs.view(torch.float32).view(-1, BLOCK)


@cache
def _encode_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """For every grid and every upper half of a value: the nearest magnitude, and the one not above it."""
    starts = (torch.arange(_UPPER_HALVES, dtype=torch.int32) << 16).view(torch.float32)
    nearest, below = [], []
    for levels in GRIDS.values():
        magnitudes = torch.tensor(levels, dtype=torch.float32)
        middles = (magnitudes[1:] + magnitudes[:-1]) / 2
        nearest.append(torch.bucketize(starts, middles, right=True))
        below.append(torch.bucketize(starts, magnitudes, right=True) - 1)
    return torch.cat(nearest).to(torch.uint8).to(device), torch.cat(below).to(torch.uint8).to(device)


@cache
def _decode_table(device: torch.device) -> Tensor:
    """For every grid and byte, two fp32 values held as one fp64: a look-up moves both."""
    signed = torch.tensor([[*levels, *(0.0 - level for level in levels)] for levels in GRIDS.values()])
    byte = torch.arange(_BYTES)
    pairs = torch.stack([signed[:, byte & 15], signed[:, byte >> 4]], dim=2)
    return pairs.contiguous().view(torch.float64).view(-1).to(device)
