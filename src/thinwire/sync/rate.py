"""The learning rate of local steps: how much it is scaled, and how, with schedulers that overwrite it in every step."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Any

import torch

MOST = 2.0  # the largest factor that was shown to help


def scale_for(world_size: int, optimizers: Iterable[torch.optim.Optimizer], rounds: int) -> float:
    """By how much local steps should be longer than those of data parallelism.

    Adam divides by the root of the second moment of one worker's gradients, whose noise is about √W times that of their
    mean; so the mean of W local steps is shorter than a step along the mean. The factor is √W, at most 2: with 4 workers
    2 was best on all tasks tried, others were not measured. An average that comes rarely (more than ``rounds`` = 4 steps
    apart) lets replicas drift, and long runs were better at the rate as it is. SGD's mean step needs no factor.

    Args:
        rounds: steps until every weight has been averaged once.
    """
    adaptive = all("betas" in optimizer.defaults for optimizer in optimizers)
    return min(sqrt(world_size), MOST) if adaptive and rounds <= 4 else 1.0


class ScaledRate:
    """Scales the rate for the length of an optimizer step, so that schedulers and logs see the user's own."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._before: dict[int, list[Any]] = {}

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step."""
        self.restore(optimizer)  # a step that raised has left it scaled
        if self.factor != 1.0:
            self._before[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self.factor  # not in place: it may be a tensor that a scheduler holds

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """After it."""
        for group, rate in zip(optimizer.param_groups, self._before.pop(id(optimizer), []), strict=False):
            group["lr"] = rate
