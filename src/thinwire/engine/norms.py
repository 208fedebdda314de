"""Squared norms of local gradients and of their means, while somebody wants them: gradient noise is estimated from both."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from thinwire.engine.groups import Unit


class Norms:
    """Sums over the steps that counted, by parameter name.

    Attributes:
        wanted: whether to take part; a pass over the gradients is not free.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.local_sq: dict[str, float] = defaultdict(float)
        self.mean_sq: dict[str, float] = defaultdict(float)
        self._step: list[tuple[dict[str, float], str, float]] = []

    def add_local(self, unit: Unit, x: Tensor) -> None:
        """The gradient of this rank."""
        self._add(self.local_sq, unit, x)

    def add_mean(self, unit: Unit, mean: Tensor) -> None:
        """The mean over the ranks."""
        self._add(self.mean_sq, unit, mean)

    def end_step(self, counts: bool) -> None:
        """What a skipped step has left says nothing."""
        for sums, name, value in self._step if counts else ():
            sums[name] += value
        self._step.clear()

    def clear(self) -> None:
        """Forget all sums."""
        self.local_sq.clear()
        self.mean_sq.clear()

    def _add(self, sums: dict[str, float], unit: Unit, x: Tensor) -> None:
        if self.wanted:
            parts = zip(unit.spec.tensors, x.split(unit.spec.sizes), strict=True)
            self._step += [(sums, tensor.fqn, float(part.dot(part))) for tensor, part in parts]
