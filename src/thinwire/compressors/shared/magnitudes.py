"""Magnitudes of a unit, tensor by tensor: what estimates of thresholds count and average, for all tensors in one call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from thinwire import kernels


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """Some or all magnitudes of each tensor; ``offsets`` are the bounds of the tensors. One result per tensor, in fp64."""

    values: Tensor
    offsets: tuple[int, ...]

    @cached_property
    def counts(self) -> Tensor:
        return torch.tensor(self.offsets, dtype=torch.float64, device=self.values.device).diff()

    def mean_and_variance(self) -> tuple[Tensor, Tensor]:
        """0 and 0 for a tensor without values."""
        sums, squares = kernels.segment_moments(self.values, self.offsets)
        count = self.counts.clamp(min=1)
        mean = sums / count
        return mean, (squares / count - mean.square()).clamp(min=0)

    def above(self, limits: Tensor) -> Magnitudes:
        """Only the values that exceed the limit of their tensor, which is rounded to fp32."""
        chosen = kernels.ef_threshold_pack(self.values, None, self.offsets, limits.float().tolist())
        return Magnitudes(chosen.values, tuple(accumulate(chosen.counts, initial=0)))

    def counts_above(self, limits: Tensor) -> Tensor:
        """How many values exceed the limit of their tensor, which is rounded to fp32."""
        return self.above(limits).counts


def magnitudes(x: Tensor, offsets: tuple[int, ...]) -> Magnitudes:
    """All magnitudes of the flat unit ``x``."""
    return Magnitudes(x.abs(), offsets)


def just_below(limits: Tensor) -> Tensor:
    """The next smaller fp32 number, so that comparing with ``>`` lets the limit itself pass."""
    single = limits.float()
    return torch.nextafter(single, torch.full_like(single, -torch.inf))


def below_largest(limits: Tensor, largest: Tensor) -> Tensor:
    """Limits lowered where nothing would exceed them: a tensor that is not all zeros always sends something."""
    return torch.where(largest > 0, torch.minimum(limits.float(), just_below(largest)), limits.float())
