"""4-bit powers of two: Miyashita et al., Convolutional Neural Networks using Logarithmic Data Representation (2016)."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compressors.shared.blockwise import FewBits
from thinwire.core import register


@register("pot4")
@dataclass(frozen=True, kw_only=True)
class Pot4(FewBits):
    """Four bits per value on the grid 0, 1, 2, 4, ... 64: coarse but wide, for blocks of very unlike magnitudes."""

    maturity = "experimental"
    feedback = True
