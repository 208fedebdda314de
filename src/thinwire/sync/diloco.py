"""DiLoCo: Douillard et al., Distributed Low-Communication Training of Language Models (2023), algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire.sync.local import Local
from thinwire.sync.local_steps import Numbers


def nesterov(anchor: Tensor, mean: Tensor, memory: dict[str, Tensor], lr: float, momentum: float) -> Tensor:
    """One step of SGD with Nesterov momentum along the mean delta: m = μ m + Δ;  A' = A + lr (Δ + μ m)."""
    memory["momentum"] = momentum * memory["momentum"] + mean
    return anchor + lr * (mean + momentum * memory["momentum"])


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Local):
    """``h`` local steps of AdamW, then an outer Nesterov step on the mean of what the workers have moved.

    Args:
        h: local steps; the paper has 500, at an evaluation loss close to that of 50.
        outer_lr: of the outer step; with momentum 0.9 several times this much is applied in the long run.
        momentum: μ; 0 and ``outer_lr=1`` is local SGD.
    """

    h: int = 50
    outer_lr: float = 0.7
    momentum: float = 0.9

    memory: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("momentum", 0 <= self.momentum < 1, "0 or more and below 1")

    def outer(self, anchor: Tensor, mean: Tensor, memory: dict[str, Tensor], numbers: Numbers) -> Tensor:
        return nesterov(anchor, mean, memory, self.outer_lr, self.momentum)
