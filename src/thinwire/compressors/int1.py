"""One bit per value, one bf16 scale per 64 values: 25.6 times fewer bytes, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compressors.shared.coarse import Coarse
from thinwire.core import register


@register("int1")
@dataclass(frozen=True, kw_only=True)
class Int1(Coarse):
    """One bit per value, one bf16 scale per 64 values: 25.6 times fewer bytes, with error feedback, also of the mean.

    Per block of 64, C(u) = sign(u)·mean |u|: the best value for one bit. Sums are formed in fp32, and the mean is written in
    one bit again; ``sign`` gathers the signs of all ranks instead and so grows with the world. After Seide et al., 1-Bit SGD
    (Interspeech'14), with one scale per block instead of two per column. The residual of the mean is that of DoubleSqueeze
    (Tang et al., ICML'19), kept by the owner of each shard instead of by a server; see ``shared.mean_feedback``.
    """
