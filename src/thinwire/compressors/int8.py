"""One byte per value, one fp32 scale per 256 values, sums in fp32: a quarter of the bytes."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compressors.shared.blockwise import FewBits
from thinwire.core import register


@register("int8")
@dataclass(frozen=True, kw_only=True)
class Int8(FewBits):
    """One byte per value, one fp32 scale per 256 values, sums in fp32: a quarter of the bytes."""

    maturity = "stable"
    feedback = False
