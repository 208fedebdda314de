"""The definition of 1 and 2 bits per value, in plain torch: as everything in `reference`, slow and obvious."""

import torch
from torch import Tensor

from thinwire.kernels.types import Coarse, Quantized

MEAN_LANES = 16
SCALE_OF_MEAN = {1: 1.0, 2: 1.25}
LARGEST_SCALE = 2.0**127  # 1.5 times that is still finite
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def coarse_encode(bits: Coarse, grad: Tensor, residual: Tensor | None, block: int, out: Tensor) -> Quantized:
    """One bf16 scale s per block of `u = grad + residual`, and each value as a level of the same sign.

    1 bit: `s = mean |u|` is the level, the code is the sign. 2 bits: `s = 1.25 mean |u|`; the level is 0.5 s below s, 1.5 s
    from s on; the upper bit is the sign, the lower is set for 1.5 s. The residual is u minus what is decoded, so it is that
    of the rounded scale. A scale below the smallest normal number becomes 0. A block that is not finite has a NaN scale, and
    codes and residual as if it were zero.
    """
    unit = grad if residual is None else residual + grad
    numel = unit.numel()
    blocks = torch.nn.functional.pad(unit, (0, -numel % block)).view(-1, block)
    poisoned = ~torch.isfinite(blocks).all(1)
    blocks = torch.where(poisoned.unsqueeze(1), 0.0, blocks)
    scales = _scales(blocks, numel, bits)
    negative, far = torch.signbit(blocks), blocks.abs() >= scales.unsqueeze(1)
    codes = negative.to(torch.uint8) if bits == 1 else 2 * negative.to(torch.uint8) + far.to(torch.uint8)
    out.copy_((blocks - _levels(codes, bits) * scales.unsqueeze(1)).flatten()[:numel])
    stored = torch.where(poisoned, torch.nan, scales).to(torch.bfloat16)
    return Quantized(_packed(codes.flatten()[:numel], bits), stored, out, not bool(poisoned.any()))


def coarse_decode(
    bits: Coarse, codes: Tensor, scales: Tensor, block: int, weight: float, out: Tensor, accumulate: bool
) -> None:
    """`(level * scale) * weight`, written to `out` or added to it."""
    numel, shifts = out.numel(), torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    unpacked = ((codes.unsqueeze(1) >> shifts) & (2**bits - 1)).flatten()[:numel]
    spread = scales.to(torch.float32).repeat_interleave(block)[:numel]
    decoded = _levels(unpacked, bits) * spread * weight
    out.copy_(out + decoded if accumulate else decoded)


def _scales(blocks: Tensor, numel: int, bits: Coarse) -> Tensor:
    """From the mean magnitudes, in bf16 (held as fp32). Element i is added to lane `i % 16`, ascending; then lane j takes
    lane j + 8, j + 4, j + 2, j + 1. Terms are divided before they are added, so that no sum of finite values overflows."""
    count, block = blocks.shape
    lengths = (numel - torch.arange(count, device=blocks.device) * block).clamp(max=block)
    terms = blocks.abs() * (1.0 / lengths.to(torch.float32)).unsqueeze(1)
    lanes = blocks.new_zeros(count, MEAN_LANES)
    for part in terms.split(MEAN_LANES, dim=1):
        lanes = lanes + part
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    scales = (lanes.squeeze(1) * SCALE_OF_MEAN[bits]).clamp(max=LARGEST_SCALE).to(torch.bfloat16).to(torch.float32)
    return torch.where(scales < _SMALLEST_NORMAL, 0.0, scales)


def _levels(codes: Tensor, bits: Coarse) -> Tensor:
    table = [1.0, -1.0] if bits == 1 else [0.5, 1.5, -0.5, -1.5]
    return torch.tensor(table, device=codes.device)[codes.long()]


def _packed(codes: Tensor, bits: Coarse) -> Tensor:
    """Several codes per byte, the first in the lowest bits; bits behind the last are zero."""
    rows = torch.nn.functional.pad(codes, (0, -codes.numel() % (8 // bits))).view(-1, 8 // bits)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (rows << shifts).sum(dim=1, dtype=torch.uint8)
