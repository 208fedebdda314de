"""SPARTA: exo labs, sparse parameter averaging (2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire.sync.local_steps import LocalSteps, Numbers


@dataclass(frozen=True, kw_only=True)
class Sparta(LocalSteps):
    """Average a small random part of the weights in every step, at positions that a shared seed draws.

    Positions that are not drawn keep every rank's own values, so nothing waits in a residual. Where a mean delta is exactly
    zero a position counts as not drawn. The anchor holds what each position was when last drawn, which is old: evaluation
    takes the mean of the replicas. Small tensors and vectors are averaged whole.

    Args:
        density: part of the weights per step; exo labs try 0.0005 to 0.005.
        delay: steps until it is merged; about 10 were tolerated.
    """

    density: float = 0.005
    delay: int = 1

    anchored: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("density", 0 < self.density <= 1, "above 0, at most 1")
        self._require("delay", self.delay <= 1, "0 or 1: a position must not be drawn again before its mean is in")

    @property
    def compressor(self) -> str:
        return f"noef | randomk(density={self.density})"

    def due(self, step: int, numbers: Numbers) -> Sequence[int]:
        return [0]

    def merge(self, weights: Tensor, new: Tensor, snapshot: Tensor, mean: Tensor) -> None:
        weights.add_((new - snapshot) * (mean != 0))
