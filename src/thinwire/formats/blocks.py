"""Blocks of neighbouring values and the scales they share.

A block that holds a NaN or an infinity gets a NaN scale and zero codes: its decoder sees NaN, and the residual
stays clean. The kernels of ``int8`` and ``int4`` do the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def as_blocks(x: Tensor, block: int) -> Tensor:
    """``x`` as rows of ``block`` values, the last one padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)


def floor_log2(x: Tensor) -> Tensor:
    """floor(log2 x) as integers, exactly; x is positive and finite."""
    return torch.frexp(x).exponent - 1


def power_of_two_scales(amax: Tensor, largest: float) -> Tensor:
    """The smallest powers of two s with amax / s <= largest, as far as fp32 has normal ones; NaN for what is not finite."""
    mantissa, exponent = torch.frexp(amax / largest)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 126)
    scales = torch.ldexp(torch.ones_like(amax), exponent)
    return torch.where(torch.isfinite(amax), scales, torch.nan)


def bf16_scales_above(wanted: Tensor) -> Tensor:
    """``wanted`` rounded up to bfloat16 (held as fp32), so that no value lies above the grid; 0 below normal numbers."""
    bits = (wanted.contiguous().view(torch.int32) + 0xFFFF) & ~0xFFFF
    scales = torch.where(wanted < _SMALLEST_NORMAL, 0.0, bits.view(torch.float32))
    return torch.where(torch.isfinite(wanted), scales, torch.nan)


def normalised(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks divided by their scales: multiplied with the inverse, and zero where the scale is 0 or NaN."""
    inverses = torch.where(scales > 0, 1.0 / scales, 0.0)
    if bool(torch.isnan(scales).any()):
        blocks = torch.where(torch.isnan(scales)[:, None], 0.0, blocks)
    return blocks * inverses[:, None]


def residual_of(x: Tensor, decoded: Tensor) -> Tensor:
    """x - decoded, written over ``x``; 0 where the block was not finite."""
    rest = x.sub_(decoded.reshape(-1)[: x.numel()])
    # One multiply-free look at the sum finds the rare NaN without a mask over everything.
    return rest if bool(torch.isfinite(rest.sum())) else rest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
