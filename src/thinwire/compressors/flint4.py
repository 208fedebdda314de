"""flint: Guo et al., ANT (MICRO'22), section 4; the 3-bit magnitudes that remain beside a sign."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compressors.shared.blockwise import FewBits
from thinwire.core import register


@register("flint4")
@dataclass(frozen=True, kw_only=True)
class Flint4(FewBits):
    """Four bits per value on the grid 0, 1, 2, 3, 4, 6, 8, 16: even near zero, wide at the end, for a few outliers."""

    maturity = "experimental"
    feedback = True
