"""Wire formats as data: how many bits a value takes, which values share a scale, how to encode and decode.

None of the scaled formats overflows: the scale of a block is derived from its own magnitudes, travels beside the codes, and
sums are formed in fp32 after decoding. ``thinwire.formats.reference`` has the slow twin of every format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.errors import ConfigError
from thinwire.formats import coarse, floats, fp8, grids, integers
from thinwire.formats.types import Decode, Encode, Encoded
from thinwire.kernels import Bits, Coarse


class Width(NamedTuple):
    """How the bits of a code are used; ``exponent`` is 0 for integers and for grids that are tables."""

    bits: int
    exponent: int = 0
    mantissa: int = 0


@dataclass(frozen=True)
class WireFormat:
    """One way to write values.

    Args:
        width: bits per value, scales not counted, and how they are used.
        block: how many neighbouring values share a scale.
        scale_dtype: dtype of the scales; None for a format without.
        summable: codes of different ranks may be added as they are.
        error_bound: the largest rounding error, as a fraction of the largest magnitude in the block.
        stochastic: values can be rounded at random, without bias.
        by_rows: there are kernels that write and read a matrix of messages in one call.
    """

    name: str
    width: Width
    block: int
    scale_dtype: torch.dtype | None
    encoder: Encode
    decode: Decode
    error_bound: float
    summable: bool = False
    stochastic: bool = False
    by_rows: Bits | None = None

    @property
    def bits(self) -> int:
        """Bits per value, scales not counted."""
        return self.width.bits

    def encode(self, x: Tensor, generator: torch.Generator | None = None) -> Encoded:
        """Flat fp32 values as codes, scales and error; the error may be written over ``x``.

        Args:
            generator: rounds at random instead of to nearest; only for formats that are ``stochastic``.
        """
        assert generator is None or self.stochastic, f"{self.name} has no stochastic rounding"
        return self.encoder(x, generator)

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


def _fp8(name: str, variant: fp8.Variant) -> WireFormat:
    width = Width(8, variant.exponent, variant.mantissa)
    encode, decode = fp8.coder(variant)
    bound = 2.0 ** -(variant.mantissa + 1)
    return WireFormat(name, width, fp8.BLOCK, torch.bfloat16, encode, decode, bound, stochastic=True)


def _grid4(name: str) -> WireFormat:
    encode, decode = grids.coder(name)
    bound = grids.error_bound(name)
    return WireFormat(name, Width(4), grids.BLOCK, torch.bfloat16, encode, decode, bound, stochastic=True)


def _coarse(name: str, bits: Coarse) -> WireFormat:
    encode, decode = coarse.coder(bits)
    # A block of one value and zeros: the mean is 1/64 of the value, which is cut to the outermost level.
    bound = 1 - (1.0 if bits == 1 else 1.5 * 1.25) * (1 - 2**-8) / coarse.BLOCK
    return WireFormat(name, Width(bits), coarse.BLOCK, torch.bfloat16, encode, decode, bound, by_rows=bits)


FORMATS: dict[str, WireFormat] = {
    f.name: f
    for f in (
        WireFormat("fp32", Width(32, 8, 23), 1, None, floats.encode_fp32, floats.decode_fp32, 0.0, summable=True),
        WireFormat("bf16", Width(16, 8, 7), 1, None, floats.encode_bf16, floats.decode_bf16, 2.0**-8, summable=True),
        WireFormat(
            "fp16",
            Width(16, 4, 11),
            floats.FP16_BLOCK,
            torch.bfloat16,
            floats.encode_fp16,
            floats.decode_fp16,
            2.0**-12,
        ),
        _fp8("fp8", fp8.E4M3),
        _fp8("fp8_e5m2", fp8.E5M2),
        WireFormat(
            "int8",
            Width(8),
            integers.INT8_BLOCK,
            torch.float32,
            integers.encode_int8,
            integers.decode_int8,
            0.5 / 127,
            stochastic=True,
            by_rows=8,
        ),
        WireFormat(
            "int4",
            Width(4),
            integers.INT4_BLOCK,
            torch.bfloat16,
            integers.encode_int4,
            integers.decode_int4,
            0.5 / 7 * (1 + 2**-8),  # the scale is rounded to bf16
            stochastic=True,
            by_rows=4,
        ),
        _grid4("float4"),
        _grid4("pot4"),
        _grid4("flint4"),
        _coarse("int2", 2),
        _coarse("int1", 1),
    )
}
