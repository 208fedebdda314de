"""SlowMo: Wang et al., Improving Communication-Efficient Distributed SGD with Slow Momentum (ICLR'20), algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire.sync.local import Local
from thinwire.sync.local_steps import Numbers, Round


@dataclass(frozen=True, kw_only=True)
class SlowMo(Local):
    """Local steps, then a step of slow momentum on the average: u = β u + (A - mean x_i)/γ;  A' = A - α γ u.

    γ is the learning rate of the optimizer's first group, averaged over the ranks.

    Args:
        momentum: β; higher: steadier, and further past a turn. 0 is local SGD.
        outer_lr: α; the length of the slow step.
    """

    h: int = 12
    momentum: float = 0.5
    outer_lr: float = 1.0

    memory: ClassVar[tuple[str, ...]] = ("momentum",)
    scalars: ClassVar[tuple[str, ...]] = ("lr",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("momentum", 0 <= self.momentum < 1, "0 or more and below 1")

    def adapt(self, numbers: Numbers, round_: Round) -> None:
        rates = round_.scalars["lr"]
        numbers["lr"] = max(sum(rates) / len(rates), 1e-30)  # a schedule may end at zero

    def outer(self, anchor: Tensor, mean: Tensor, memory: dict[str, Tensor], numbers: Numbers) -> Tensor:
        memory["momentum"] = self.momentum * memory["momentum"] - mean / numbers["lr"]
        return anchor - self.outer_lr * numbers["lr"] * memory["momentum"]
