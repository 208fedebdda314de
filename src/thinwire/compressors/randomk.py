"""Random-k with a shared seed: Stich et al., Sparsified SGD with Memory (NeurIPS'18)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compressors.shared.sparse import check_density, kept
from thinwire.core import AllReduce, Compressor, Exchange, Exchanged, State, Step, UnitSpec, register


@register("randomk")
@dataclass(frozen=True, kw_only=True)
class RandomK(Compressor):
    """Send a random fraction of every tensor, the same entries on all ranks: no indices, plain all-reduce.

    A tensor of n entries is cut into k equal strata and one entry is drawn from each: distinct entries, each with
    probability k/n, in O(k).

    Args:
        density: fraction of the entries to send.
    """

    feedback = True
    scheduled = ("density",)

    density: float = 0.01

    def __post_init__(self) -> None:
        check_density(self.density)

    @property
    def sparse(self) -> bool:
        return True

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        indices = self.at(step.index)._draw(step).to(x.device)
        averaged = yield AllReduce(x[indices])
        x[indices] = 0
        mean = torch.zeros_like(x)
        mean[indices] = averaged
        return Exchanged(mean, x, state)

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        count = sum(kept(self.density, size) for size in unit.sizes)
        return 2 * (world_size - 1) * 4 * count // world_size

    def _draw(self, step: Step) -> Tensor:
        generator = step.generator("randomk")
        drawn = [torch.empty(0, dtype=torch.int64)]
        for start, size in zip(step.unit.offsets, step.unit.sizes, strict=False):
            edges = torch.arange(kept(self.density, size) + 1) * size // max(kept(self.density, size), 1)
            uniform = torch.rand(edges.numel() - 1, generator=generator, dtype=torch.float64)
            drawn.append(start + edges[:-1] + (uniform * edges.diff()).long())
        return torch.cat(drawn)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(density=0.1)]
