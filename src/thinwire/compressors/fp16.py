"""Round every value to float16 under a power-of-two block scale: half the bytes, nothing underflows, sums in fp32."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compressors.blockwise import Blockwise
from thinwire.core import register


@register("fp16")
@dataclass(frozen=True, kw_only=True)
class Fp16(Blockwise):
    """Round every value to float16 under a power-of-two block scale: half the bytes, nothing underflows, sums in fp32."""

    maturity = "stable"
    feedback = False
    format = "fp16"
