"""Wire formats as data: how many bits a value takes, which values share a scale, how to encode and decode.

None of the scaled formats underflows or overflows: the scale of a block is derived from its own largest magnitude, travels
beside the codes, and sums are formed in fp32 after decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.errors import ConfigError


class Encoded(NamedTuple):
    """Codes as bytes, one scale per block (None where there are none), and the rounding error."""

    codes: Tensor
    scales: Tensor | None
    residual: Tensor


class Decode(Protocol):
    def __call__(self, codes: Tensor, scales: Tensor | None, weight: float, out: Tensor, accumulate: bool) -> None: ...


@dataclass(frozen=True)
class WireFormat:
    """One way to write values.

    Args:
        bits: bits per value, scales not counted.
        block: how many neighbouring values share a scale.
        scale_dtype: dtype of the scales; None for a format without.
        encode: flat fp32 values -> codes, scales, error; the error may be written over the input.
        decode: adds (or writes) ``weight`` × the decoded values into ``out``.
    """

    name: str
    bits: int
    block: int
    scale_dtype: torch.dtype | None
    encode: Callable[[Tensor], Encoded]
    decode: Decode

    def code_bytes(self, numel: int) -> int:
        return -(-numel * self.bits // 8)

    def scale_bytes(self, numel: int) -> int:
        return 0 if self.scale_dtype is None else -(-numel // self.block) * self.scale_dtype.itemsize

    def message_bytes(self, numel: int) -> int:
        """Bytes of ``numel`` values with their scales."""
        return self.code_bytes(numel) + self.scale_bytes(numel)


def wire_format(name: str) -> WireFormat:
    """Look a format up by name.

    Raises:
        ConfigError: there is none of that name.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(f"unknown value format {name!r}. Available: {', '.join(sorted(FORMATS))}.") from None


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _store(values: Tensor, weight: float, out: Tensor, accumulate: bool) -> None:
    scaled = values if weight == 1.0 else values * weight
    if accumulate:
        out.add_(scaled)
    else:
        out.copy_(scaled)


def _encode_fp32(x: Tensor) -> Encoded:
    return Encoded(_as_bytes(x.clone()), None, x.zero_())


def _decode_fp32(codes: Tensor, scales: Tensor | None, weight: float, out: Tensor, accumulate: bool) -> None:
    _store(codes.view(torch.float32), weight, out, accumulate)


def _encode_bf16(x: Tensor) -> Encoded:
    codes = x.to(torch.bfloat16)
    return Encoded(_as_bytes(codes), None, x.sub_(codes.float()))


def _decode_bf16(codes: Tensor, scales: Tensor | None, weight: float, out: Tensor, accumulate: bool) -> None:
    _store(codes.view(torch.bfloat16).float(), weight, out, accumulate)


_FP16_BLOCK = 256


def _encode_fp16(x: Tensor) -> Encoded:
    """Scales are powers of two that bring the largest magnitude of a block to [2^14, 2^15): exact to apply and undo."""
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % _FP16_BLOCK)).view(-1, _FP16_BLOCK)
    _, exponent = torch.frexp(blocks.abs().amax(dim=1))
    # 2^±112 keep scale and inverse normal; smaller blocks are below 2^-97 and lose nothing that matters to fp32 sums.
    scales = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), (15 - exponent).clamp(-112, 112))
    codes = (blocks * scales[:, None]).to(torch.float16)
    decoded = (codes.float() / scales[:, None]).view(-1)[: x.numel()]
    return Encoded(_as_bytes(codes.view(-1)[: x.numel()]), scales, x.sub_(decoded))


def _decode_fp16(codes: Tensor, scales: Tensor | None, weight: float, out: Tensor, accumulate: bool) -> None:
    assert scales is not None
    values = codes.view(torch.float16).float()
    spread = scales.repeat_interleave(_FP16_BLOCK)[: values.numel()]
    _store(values / spread, weight, out, accumulate)


def _encode_int8(x: Tensor) -> Encoded:
    quantized = kernels.int8_encode(x, None, out=x)
    return Encoded(_as_bytes(quantized.codes), quantized.scales, quantized.residual)


def _decode_int8(codes: Tensor, scales: Tensor | None, weight: float, out: Tensor, accumulate: bool) -> None:
    assert scales is not None
    signed = codes.view(torch.int8)
    kernels.int8_decode(signed, scales, out.numel(), weight=weight, out=out, accumulate=accumulate)


def _encode_int4(x: Tensor) -> Encoded:
    quantized = kernels.int4_encode(x, None, out=x)
    return Encoded(quantized.codes, quantized.scales, quantized.residual)


def _decode_int4(codes: Tensor, scales: Tensor | None, weight: float, out: Tensor, accumulate: bool) -> None:
    assert scales is not None
    kernels.int4_decode(codes, scales, out.numel(), weight=weight, out=out, accumulate=accumulate)


FORMATS: dict[str, WireFormat] = {
    f.name: f
    for f in (
        WireFormat("fp32", 32, 1, None, _encode_fp32, _decode_fp32),
        WireFormat("bf16", 16, 1, None, _encode_bf16, _decode_bf16),
        WireFormat("fp16", 16, _FP16_BLOCK, torch.float32, _encode_fp16, _decode_fp16),
        WireFormat("int8", 8, 256, torch.float32, _encode_int8, _decode_int8),
        WireFormat("int4", 4, 64, torch.bfloat16, _encode_int4, _decode_int4),
    )
}
