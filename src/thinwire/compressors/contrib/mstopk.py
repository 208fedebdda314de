"""MSTopk: Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters (MLSys'21)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.shared.magnitudes import Magnitudes, magnitudes
from thinwire.compressors.shared.sparse import Sparsifier, check_density, kept
from thinwire.core import Compressor, ConfigError, Step, UnitSpec, register
from thinwire.kernels import Selected


@register("mstopk")
@dataclass(frozen=True, kw_only=True)
class MSTopK(Sparsifier):
    """Send exactly k entries: all above a bisected threshold, filled up from those just below it.

    Each step of the bisection only counts. It ends with two thresholds, exceeded by at most k and by at least k entries; what
    exceeds the upper one is sent and the rest is taken from between the two. The paper takes a random run of those; here
    it is the lowest positions, so that equal input gives equal messages. With enough bisections that is the exact top-k.

    Args:
        density: fraction of the entries to send: k = max(1, floor(density·n)) of every tensor.
        bisections: how often to count. Fewer: faster, and the last entries are chosen less well.
    """

    scheduled = ("density",)

    density: float = 0.01
    bisections: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        if self.bisections < 1:
            raise ConfigError(f"mstopk: bisections is {self.bisections}; expected 1 or more, for example 30")

    def select(self, x: Tensor, step: Step) -> Selected:
        offsets = step.unit.offsets
        ks = torch.tensor([kept(self.density, size) for size in step.unit.sizes], device=x.device)
        low, high = self._bracket(magnitudes(x, offsets), kernels.segment_amax(x, offsets), ks)
        candidates = kernels.ef_threshold_pack(x, None, offsets, low.tolist(), out=x)
        chosen = _filled(candidates, high, ks)
        left = candidates.indices[~chosen].long()
        x[left] = candidates.values[~chosen]
        values, indices = candidates.values[chosen], candidates.indices[chosen]
        return Selected(values, indices, tuple(ks.tolist()), x, candidates.finite)

    def _bracket(self, everything: Magnitudes, largest: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Per tensor a threshold that at least k entries exceed, and one that at most k do; both exactly fp32."""
        mean, _ = everything.mean_and_variance()
        at_mean = everything.counts_above(mean)
        below_all = torch.full_like(largest, -1)  # also zeros exceed it
        low = torch.where(at_mean >= wanted, mean.float(), below_all)
        high = torch.where(at_mean <= wanted, mean.float(), largest)
        candidates = everything
        for _ in range(self.bisections):
            candidates = candidates.above(low)
            middle = (low.double() + high.double()).div(2).float()
            counts = candidates.counts_above(middle)
            low, high = torch.where(counts >= wanted, middle, low), torch.where(counts <= wanted, middle, high)
            if bool((low >= high).all()):
                break
        return low, high

    def selected_elems(self, unit: UnitSpec) -> int:
        return sum(kept(self.density, size) for size in unit.sizes)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(density=0.01), cls(density=0.1, bisections=4, values="int4")]


def _filled(candidates: Selected, high: Tensor, ks: Tensor) -> Tensor:
    """Which candidates exceed ``high`` or, in order of position, fill up what their tensor still lacks to k."""
    counts = torch.tensor(candidates.counts, device=ks.device)
    tensor = torch.arange(counts.numel(), device=ks.device).repeat_interleave(counts)
    certain = candidates.values.abs() > high[tensor]
    missing = ks - torch.bincount(tensor[certain], minlength=counts.numel())
    spare = (~certain).long()
    spares_before = spare.cumsum(0) - spare
    spares = torch.bincount(tensor[~certain], minlength=counts.numel())
    rank = spares_before - (spares.cumsum(0) - spares)[tensor]
    return certain | (rank < missing[tensor])
