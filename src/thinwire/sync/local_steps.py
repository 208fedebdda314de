"""What policies with local steps say, as functions of their arguments; ``replica`` puts them to work.

Most policies are this with another rule or two: when a fragment is due, where the anchor moves by a mean, how weights that
have moved on take it in, and what is learned from the numbers of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.core import ConfigError
from thinwire.sync.context import Context
from thinwire.sync.pieces import Piece, cut
from thinwire.sync.policy import Bound
from thinwire.sync.replica import Numbers, Replica, Round

__all__ = ["LocalSteps", "Numbers", "Periodic", "Round"]  # all that the file of a policy needs


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """Workers step on their own gradients and average what they have moved, now and then.

    Args:
        delay: steps between sending deltas and taking in their mean; 0 waits at once, more hides the exchange.
        start: gradients are averaged in the first so many steps, and workers step locally from then on.
        compress: what deltas send.
        lr_scale: factor of the learning rate in local steps; 1.0 leaves it.

    Class attributes:
        memory: tensors that the rule of the anchor keeps, one each per weight.
        scalars: what ranks tell each other: of ``loss``, ``lr``, ``step_s`` and ``exchange_s``.
        anchored: the anchor is worth evaluating.
    """

    delay: int = 0
    start: int = 0
    compress: str = "dense"
    lr_scale: float | None = 1.0

    memory: ClassVar[tuple[str, ...]] = ()
    scalars: ClassVar[tuple[str, ...]] = ()
    anchored: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._require("delay", self.delay >= 0, "0 steps or more")
        self._require("start", self.start >= 0, "0 steps or more")
        self._require("lr_scale", self.lr_scale is None or self.lr_scale > 0, "a positive factor")

    @property
    def exchanges_gradients(self) -> bool:
        return self.start > 0

    @property
    def compressor(self) -> str:
        """What deltas send."""
        return self.compress

    def bind(self, context: Context) -> Bound:
        return Replica(self, context)

    def cut(self, tensors: Mapping[str, Tensor]) -> list[list[Piece]]:
        """What is averaged together."""
        return cut(tensors, 1)

    def begin(self) -> Numbers:
        """The numbers before the first local step; the same on all ranks."""
        return {}

    def due(self, step: int, numbers: Numbers) -> Sequence[int]:
        """Which fragments are sent after this local step, the first of which is 1. May write ``numbers``."""
        raise NotImplementedError

    def weight(self, numbers: Numbers, loss: float) -> float:
        """How much this rank counts, beside the steps it has taken."""
        return 1.0

    def adapt(self, numbers: Numbers, round_: Round) -> None:
        """Learn from an averaging: write ``numbers``, from what all ranks know only."""

    def outer(self, anchor: Tensor, mean: Tensor, memory: dict[str, Tensor], numbers: Numbers) -> Tensor:
        """The new anchor; writes new tensors into ``memory``, never into old ones."""
        return anchor + mean

    def merge(self, weights: Tensor, new: Tensor, snapshot: Tensor, mean: Tensor) -> None:
        """Take a new anchor into weights that have moved on since ``snapshot``."""
        if self.delay:
            weights.add_(new - snapshot)  # keeps the own progress of the steps in between
        else:
            weights.copy_(new)  # to the last bit the same on all ranks, which adding a difference is not

    def rate_factor(self, world_size: int, optimizers: Sequence[torch.optim.Optimizer]) -> float:
        """By how much the learning rate is scaled in local steps."""
        return 1.0 if self.lr_scale is None else self.lr_scale

    def __str__(self) -> str:
        given = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        shown = ", ".join(f"{name}={value!r}" for name, value, default in given if value != default)
        name = type(self).__module__.rpartition(".")[2]  # one file, one policy, one name
        return f"{name}({shown})"

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(f"sync: {name} is {getattr(self, name)!r}; expected {expected}")


@dataclass(frozen=True, kw_only=True)
class Periodic(LocalSteps):
    """The whole model is averaged every so many steps: the first interval, from ``begin``, which ``adapt`` may change."""

    def due(self, step: int, numbers: Numbers) -> Sequence[int]:
        if step < numbers.setdefault("next", numbers["interval"]):
            return []
        numbers["next"] = step + numbers["interval"]
        return [0]
