"""Layer-wise intervals: Lee et al., Layer-wise Adaptive Model Aggregation (FedLAMA, AAAI'23), algorithm 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from thinwire.sync.deltas import SQUARE
from thinwire.sync.local import Local
from thinwire.sync.local_steps import Numbers, Round
from thinwire.sync.pieces import Piece, cut


@dataclass(frozen=True, kw_only=True)
class Layerwise(Local):
    """Average layers whose replicas hardly differ less often: every ``stretch``·h steps instead of every h.

    The discrepancy of a layer is the mean of |Δ_i - mean Δ|² over ranks and steps. At every stretch·h steps, when all layers
    are averaged, they are ordered by it, per parameter; those that differ least are stretched while their share of the
    discrepancy is below the share of parameters not stretched yet. "Layers" are runs of whole tensors of about equal size.

    Args:
        h: steps between averages of the layers that differ most.
        stretch: φ; factor for those that hardly differ.
        layers: how many; more: finer choice, and smaller messages.
    """

    h: int = 4
    stretch: int = 4
    layers: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("stretch", self.stretch >= 1, "1 or more")
        self._require("layers", self.layers >= 1, "1 or more")

    def cut(self, tensors: Mapping[str, Tensor]) -> list[list[Piece]]:
        return cut(tensors, self.layers, whole=True)

    def begin(self) -> Numbers:
        return {}

    def due(self, step: int, numbers: Numbers) -> Sequence[int]:
        every = [self.h * int(numbers.get(f"stretch{layer}", 1)) for layer in range(self.layers)]
        return [layer for layer, steps in enumerate(every) if step % steps == 0]

    def adapt(self, numbers: Numbers, round_: Round) -> None:
        spread = max(fmean(round_.scalars[SQUARE]) - round_.mean_square, 0.0)
        numbers[f"spread{round_.fragment}"] = spread / max(round_.interval, 1)
        known = [layer for layer in range(self.layers) if f"spread{layer}" in numbers]
        if round_.step % (self.h * self.stretch) or round_.fragment != known[-1]:
            return
        # Layers are of about equal size, so that their number stands for their parameters.
        order = sorted(known, key=lambda layer: numbers[f"spread{layer}"])
        total, share = sum(numbers[f"spread{layer}"] for layer in known) or 1.0, 0.0
        for count, layer in enumerate(order, start=1):
            share += numbers[f"spread{layer}"] / total
            numbers[f"stretch{layer}"] = self.stretch if share < 1 - count / len(order) else 1
