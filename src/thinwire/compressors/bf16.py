"""Round every value to bfloat16: half the bytes, 8 bits of precision, sums in fp32."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compressors.shared.blockwise import Blockwise
from thinwire.core import register


@register("bf16")
@dataclass(frozen=True, kw_only=True)
class Bf16(Blockwise):
    """Round every value to bfloat16: half the bytes, 8 bits of precision, sums in fp32."""

    maturity = "stable"
