"""Gaussian-k: Shi et al., Understanding Top-k Sparsification in Distributed Deep Learning (2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.contrib.estimated import ThresholdEstimator
from thinwire.compressors.shared.magnitudes import magnitudes
from thinwire.core import Compressor, ConfigError, UnitSpec, register

_LOWER, _RAISE = 0.5, 1.5
_FEWEST, _MOST = 2 / 3, 4 / 3


@register("gaussiank")
@dataclass(frozen=True, kw_only=True)
class GaussianK(ThresholdEstimator):
    """Send what exceeds the threshold that a normal law with the tensor's mean and deviation gives, a little corrected.

    threshold = mean + z·deviation with z the quantile 1 - density/2 of the standard normal law. Then, ``corrections`` times
    at most: halve it where fewer than 2k/3 exceed it, raise it by half where more than 4k/3 do. Formula, factors and bounds
    are as in public code of the method (not checked against the authors' own), some versions of which cut the result at the
    first k entries by position; here all that exceed the threshold are sent.

    Args:
        corrections: how often the threshold may be corrected. 0 trusts the normal law, which gradients rarely follow.
    """

    corrections: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.corrections < 0:
            raise ConfigError(f"gaussiank: corrections is {self.corrections}; expected 0 or more, for example 3")

    def thresholds(self, x: Tensor, unit: UnitSpec) -> Tensor:
        limits = self._normal_law(x, unit)
        wanted = self.wanted(unit).to(x.device)
        lowest = limits * _LOWER**self.corrections  # no correction goes below, so nothing smaller has to be counted
        candidates = magnitudes(x, unit.offsets).above(torch.minimum(lowest, limits))
        for _ in range(self.corrections):
            counts = candidates.counts_above(limits)
            few, many = counts < _FEWEST * wanted, counts > _MOST * wanted
            if not bool((few | many).any()):
                break
            limits = torch.where(few, limits * _LOWER, torch.where(many, limits * _RAISE, limits))
        return limits

    def _normal_law(self, x: Tensor, unit: UnitSpec) -> Tensor:
        sums, squares = kernels.segment_moments(x, unit.offsets)
        count = torch.tensor(unit.sizes, dtype=torch.float64, device=x.device).clamp(min=1)
        mean = sums / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        return mean + NormalDist().inv_cdf(1 - self.density / 2) * deviation

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(density=0.01), cls(density=0.1, values="bf16")]
