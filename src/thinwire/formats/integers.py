"""int8 and int4 under block scales. The kernels round to nearest; rounding at random is done here, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.formats.blocks import as_blocks, bf16_scales_above, normalised, residual_of
from thinwire.formats.types import Encoded, as_bytes

INT8_BLOCK, INT8_LIMIT = 256, 127
INT4_BLOCK, INT4_LIMIT = 64, 7
_INT4_ZERO = 8  # the nibble of code 0


def encode_int8(x: Tensor, generator: torch.Generator | None) -> Encoded:
    """One fp32 scale per 256 values."""
    if generator is not None:
        codes, scales, residual = _at_random(x, INT8_BLOCK, INT8_LIMIT, generator)
        return Encoded(as_bytes(codes[: x.numel()]), scales, residual)
    quantized = kernels.int8_encode(x, None, block=INT8_BLOCK, out=x)
    return Encoded(as_bytes(quantized.codes), quantized.scales, quantized.residual)


def decode_int8(codes: Tensor, scales: Tensor | None, weight: float, out: Tensor, accumulate: bool) -> None:
    """See ``WireFormat.decode``."""
    assert scales is not None
    signed = codes.view(torch.int8)
    kernels.int8_decode(signed, scales, out.numel(), block=INT8_BLOCK, weight=weight, out=out, accumulate=accumulate)


def encode_int4(x: Tensor, generator: torch.Generator | None) -> Encoded:
    """One bf16 scale per 64 values."""
    if generator is not None:
        codes, scales, residual = _at_random(x, INT4_BLOCK, INT4_LIMIT, generator)
        nibbles = (codes + _INT4_ZERO).to(torch.uint8)
        packed = (nibbles[0::2] | (nibbles[1::2] << 4))[: -(-x.numel() // 2)]
        return Encoded(packed, scales.to(torch.bfloat16), residual)
    quantized = kernels.int4_encode(x, None, block=INT4_BLOCK, out=x)
    return Encoded(quantized.codes, quantized.scales, quantized.residual)


def decode_int4(codes: Tensor, scales: Tensor | None, weight: float, out: Tensor, accumulate: bool) -> None:
    """See ``WireFormat.decode``."""
    assert scales is not None
    kernels.int4_decode(codes, scales, out.numel(), block=INT4_BLOCK, weight=weight, out=out, accumulate=accumulate)


def _at_random(x: Tensor, block: int, limit: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Codes floor(x / scale + u) with u uniform in [0, 1): their expectation is x / scale."""
    blocks = as_blocks(x, block)
    # Rounded up: a value above the largest code would be cut, which is a bias.
    scales = bf16_scales_above(blocks.abs().amax(dim=1) / limit)
    draw = torch.rand(blocks.shape, generator=generator).to(x.device)
    codes = normalised(blocks, scales).add_(draw).floor_().clamp_(-limit, limit)
    codes = torch.where(scales[:, None] > 0, codes, 0.0)
    residual = residual_of(x, codes * scales[:, None])
    return codes.to(torch.int8).view(-1), scales, residual
