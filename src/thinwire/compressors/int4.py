"""Four bits per value, one bf16 scale per 64 values, sums in fp32: 7.5 times fewer bytes, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compressors.shared.blockwise import FewBits
from thinwire.core import register


@register("int4")
@dataclass(frozen=True, kw_only=True)
class Int4(FewBits):
    """Four bits per value, one bf16 scale per 64 values, sums in fp32: 7.5 times fewer bytes, with error feedback."""

    maturity = "stable"
    feedback = True
