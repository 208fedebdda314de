"""fp32, bf16, and 16-bit floats under a block scale.

``fp16`` here is not IEEE half. The block scale already carries the magnitude, so 4 exponent bits suffice and the fifth is
spent on precision: 1 sign, 4 exponent, 11 mantissa bits. That halves the rounding error. Values down to 2^-26 of the
largest in their block survive (Gaussian data reach 2^-15), with full precision down to 2^-14.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from thinwire.core import memory
from thinwire.formats.blocks import as_blocks, normalised, power_of_two_scales, residual_of
from thinwire.formats.types import Encoded, as_bytes, store

FP16_BLOCK = 256
FP16_MANTISSA = 11
FP16_LARGEST = 2.0 - 2.0**-FP16_MANTISSA
_DROPPED_BITS = 23 - FP16_MANTISSA
_SMALLEST_NORMAL_EXPONENT = -14
_SMALLEST_NORMAL_BITS = (127 + _SMALLEST_NORMAL_EXPONENT) << 23  # as fp32
_STEPS_PER_ONE = 2.0 ** (FP16_MANTISSA - _SMALLEST_NORMAL_EXPONENT)  # of the values below the smallest normal one
_REBIAS = (127 + _SMALLEST_NORMAL_EXPONENT - 1) << FP16_MANTISSA


def encode_fp32(x: Tensor, generator: torch.Generator | None) -> Encoded:
    """The values themselves."""
    return Encoded(as_bytes(memory.empty(x.numel(), device=x.device).copy_(x)), None, x.zero_())


def decode_fp32(codes: Tensor, scales: Tensor | None, weight: float, out: Tensor, accumulate: bool) -> None:
    """See ``WireFormat.decode``."""
    store(codes.view(torch.float32), weight, out, accumulate)


def encode_bf16(x: Tensor, generator: torch.Generator | None) -> Encoded:
    """The upper half of every fp32 value, rounded to nearest even."""
    codes = memory.empty(x.numel(), torch.bfloat16, x.device).copy_(x)
    return Encoded(as_bytes(codes), None, residual_of(x, memory.empty(x.numel(), device=x.device).copy_(codes)))


def decode_bf16(codes: Tensor, scales: Tensor | None, weight: float, out: Tensor, accumulate: bool) -> None:
    """See ``WireFormat.decode``."""
    values = memory.empty(out.numel(), device=out.device) if accumulate else out
    values.copy_(codes.view(torch.bfloat16))
    if weight != 1.0:
        values.mul_(weight)
    if accumulate:
        out.add_(values)


def encode_fp16(x: Tensor, generator: torch.Generator | None) -> Encoded:
    """Under power-of-two scales that bring the largest magnitude of a block to (1, 2): exact to apply and undo."""
    blocks = as_blocks(x, FP16_BLOCK)
    scales = power_of_two_scales(blocks.abs().amax(dim=1), FP16_LARGEST)
    codes = to_fp16_codes(normalised(blocks, scales))
    decoded = _fp16_values(codes) * scales[:, None]
    return Encoded(as_bytes(codes.view(-1)[: x.numel()]), scales.to(torch.bfloat16), residual_of(x, decoded))


def decode_fp16(codes: Tensor, scales: Tensor | None, weight: float, out: Tensor, accumulate: bool) -> None:
    """See ``WireFormat.decode``."""
    assert scales is not None
    blocks = as_blocks(_fp16_values(codes.view(torch.int16)), FP16_BLOCK)
    store((blocks * scales.float()[:, None]).view(-1)[: out.numel()], weight, out, accumulate)


def to_fp16_codes(y: Tensor) -> Tensor:
    """int16 codes of values of magnitude at most ``FP16_LARGEST``, rounded to nearest even."""
    bits = y.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    small = (magnitude < _SMALLEST_NORMAL_BITS).view(-1).nonzero().view(-1)
    odd = (magnitude >> _DROPPED_BITS).bitwise_and_(1)
    codes = magnitude.add_(odd).add_((1 << (_DROPPED_BITS - 1)) - 1).bitwise_right_shift_(_DROPPED_BITS).sub_(_REBIAS)
    if small.numel():  # few of them, as a rule
        steps = y.view(-1).index_select(0, small).abs_().mul_(_STEPS_PER_ONE).round_()
        codes.view(-1).index_copy_(0, small, steps.to(torch.int32))
    return codes.bitwise_or_((bits >> 16).bitwise_and_(0x8000)).to(torch.int16)


def _fp16_values(codes: Tensor) -> Tensor:
    """What int16 codes stand for, before scaling."""
    table = fp16_table(codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32) & 0xFFFF).view(codes.shape)


@cache
def fp16_table(device: torch.device) -> Tensor:
    """The values of all 65 536 codes."""
    magnitude = torch.arange(1 << 15, dtype=torch.int32)
    normal = ((magnitude + _REBIAS) << _DROPPED_BITS).view(torch.float32)
    values = torch.where(magnitude < 1 << FP16_MANTISSA, magnitude / _STEPS_PER_ONE, normal)
    return torch.cat([values, -values]).to(device)
