"""4-bit floats (E2M1): Rouhani et al., Microscaling Data Formats (2023), here with bf16 scales for 64 values."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compressors.shared.blockwise import FewBits
from thinwire.core import register


@register("float4")
@dataclass(frozen=True, kw_only=True)
class Float4(FewBits):
    """Four bits per value on the grid 0, ½, 1, 1½, 2, 3, 4, 6: finer near zero than ``int4``, for heavier tails."""

    maturity = "experimental"
    feedback = True
