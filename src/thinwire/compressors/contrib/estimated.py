"""Sparsifiers that estimate the threshold which about k entries of a tensor exceed, instead of searching the k largest."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.contrib.varying import VaryingSparsifier
from thinwire.compressors.shared.magnitudes import below_largest
from thinwire.compressors.shared.sparse import check_density, kept
from thinwire.core import Step, UnitSpec
from thinwire.kernels import Selected


@dataclass(frozen=True, kw_only=True)
class ThresholdEstimator(VaryingSparsifier):
    """Base of the estimators: subclasses give one threshold per tensor. At least the largest entry is always sent.

    Args:
        density: fraction of the entries to aim at; what is sent varies around it.
    """

    scheduled = ("density",)

    density: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)

    @abstractmethod
    def thresholds(self, x: Tensor, unit: UnitSpec) -> Tensor:
        """One threshold per tensor: entries of larger magnitude are sent."""

    def select(self, x: Tensor, step: Step) -> Selected:
        return self.exceeding(x, self.thresholds(x, step.unit), step.unit)

    def exceeding(self, x: Tensor, thresholds: Tensor, unit: UnitSpec) -> Selected:
        """The entries above these thresholds; what is left is written over ``x``."""
        limits = below_largest(thresholds, kernels.segment_amax(x, unit.offsets))
        return kernels.ef_threshold_pack(x, None, unit.offsets, limits.tolist(), out=x)

    def wanted(self, unit: UnitSpec) -> Tensor:
        """k of each tensor."""
        return torch.tensor([kept(self.density, size) for size in unit.sizes], dtype=torch.float64)

    def selected_elems(self, unit: UnitSpec) -> int:
        return sum(kept(self.density, size) for size in unit.sizes)
