"""RedSync: Fang et al., Reducing Synchronization Traffic for Distributed Deep Learning (JPDC'19)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.contrib.estimated import ThresholdEstimator
from thinwire.compressors.shared.magnitudes import magnitudes
from thinwire.core import Compressor, UnitSpec, register

_BISECTIONS = 20  # steps of a millionth of max - mean: fine enough where one entry is a thousand times the others
_MOST = 2.0


@register("redsync")
@dataclass(frozen=True, kw_only=True)
class RedSync(ThresholdEstimator):
    """Send what exceeds mean + r·(max - mean) of the magnitudes, r bisected until between k and 2k entries do.

    The threshold and the bisection are the paper's. Its smaller-tensor path (a threshold lowered step by step, then an exact
    top-k of what exceeds it), its alternation of signs and its reuse of thresholds over several steps are not built here.
    Where fewer than k entries exceed the mean (a density near one half, or an outlier that lifts it) only those are sent.
    """

    def thresholds(self, x: Tensor, unit: UnitSpec) -> Tensor:
        candidates, wanted = magnitudes(x, unit.offsets), self.wanted(unit).to(x.device)
        mean, _ = candidates.mean_and_variance()
        span = kernels.segment_amax(x, unit.offsets).double() - mean
        low, high = torch.zeros_like(mean), torch.ones_like(mean)
        settled = torch.zeros_like(mean, dtype=torch.bool)
        middle = high / 2
        for _ in range(_BISECTIONS):
            candidates = candidates.above(mean + low * span)  # thresholds only rise above this from here on
            middle = torch.where(settled, middle, (low + high) / 2)
            counts = candidates.counts_above(mean + middle * span)
            few, many = counts < wanted, counts > _MOST * wanted
            settled = ~(few | many)
            if bool(settled.all()):
                break
            low, high = torch.where(many, middle, low), torch.where(few, middle, high)
        return mean + middle * span

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(density=0.01), cls(density=0.1, values="int8")]
