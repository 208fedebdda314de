"""Two bits per value, one bf16 scale per 64 values: 14.2 times fewer bytes, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compressors.shared.coarse import Coarse
from thinwire.core import register


@register("int2")
@dataclass(frozen=True, kw_only=True)
class Int2(Coarse):
    """Two bits per value, one bf16 scale per 64 values: 14.2 times fewer bytes, with error feedback, also of the mean.

    Per block of 64, s = 1.25·mean |u| and C(u) = sign(u)·s/2 where |u| < s, else sign(u)·3s/2. Sums are formed in fp32. bf16
    keeps the scale normal wherever the values are; u - C(u) is that of the rounded scale. The factor makes these the best
    four equidistant levels for Gaussian values (Max, 1960); without it the error is an eighth to a fifth larger, and a block
    of equal magnitudes lies between two levels. The residual of the mean is that of DoubleSqueeze (Tang et al., ICML'19),
    kept by the owner of each shard instead of by a server; see ``shared.mean_feedback``.
    """
