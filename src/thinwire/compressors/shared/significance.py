"""How much a block of a weight matters: scores behind one interface.

A score takes a unit whose tensors are padded to whole blocks and gives one number per block: its mean over the block's real
elements. Scores are in units of the gradient, or of gradient times weight, and never overflow where these do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.core import UnitSpec, memory
from thinwire.core.blocks import aligned_elems, to_blocks

BLOCK = 256
WEIGHT_FLOOR = (
    0.5  # γ: how much of a tensor's rms is added to |w|, so that weights at zero can still be found important
)


@dataclass(frozen=True, eq=False)
class Blocks:
    """How a unit divides into blocks; tensors one per row of ``per_tensor``, blocks one per row of ``elems``."""

    per_tensor: tuple[int, ...]
    elems: Tensor

    @property
    def count(self) -> int:
        return self.elems.numel()

    @property
    def offsets(self) -> tuple[int, ...]:
        return (0, *torch.tensor(self.per_tensor).cumsum(0).tolist())

    def of_tensors(self, values: Tensor) -> Tensor:
        """One value per tensor, repeated for each of its blocks."""
        return values.repeat_interleave(torch.tensor(self.per_tensor, device=values.device))


@lru_cache(maxsize=64)
def blocks_of(unit: UnitSpec) -> Blocks:
    """The blocks of a unit; the last one of a tensor may be short."""
    per_tensor = tuple(-(-size // BLOCK) for size in unit.sizes)
    parts = [torch.full((count,), float(BLOCK)) for count in per_tensor]
    for part, size in zip(parts, unit.sizes, strict=True):
        part[-1:] -= part.numel() * BLOCK - size
    return Blocks(per_tensor, torch.cat(parts).to(unit.device))


def as_blocks(x: Tensor, unit: UnitSpec) -> Tensor:
    """``x`` as (blocks, 256), every tensor padded with zeros; a view where nothing is to pad."""
    return memory.padded(to_blocks(x, unit, BLOCK), aligned_elems(unit, BLOCK)).view(-1, BLOCK)


Score = Callable[[Tensor, Tensor, UnitSpec], Tensor]


def _significance(x: Tensor, weights: Tensor, unit: UnitSpec) -> Tensor:
    """Mean of (|w| + γ·rms(w))·|x|, the rms being the tensor's."""
    blocks = blocks_of(unit)
    magnitudes, own = x.abs(), as_blocks(weights, unit).abs()
    squares = torch.stack([part.square().sum() for part in weights.split(unit.sizes)])
    sizes = torch.tensor(unit.sizes, device=x.device).clamp_min(1)
    rms = blocks.of_tensors((squares / sizes).sqrt())
    return (own.mul_(magnitudes).sum(dim=1) + WEIGHT_FLOOR * rms * magnitudes.sum(dim=1)) / blocks.elems


def _product(x: Tensor, weights: Tensor, unit: UnitSpec) -> Tensor:
    """Mean of |w·x|: the first-order change of the loss when the weight is removed."""
    return (as_blocks(weights, unit) * x).abs().sum(dim=1) / blocks_of(unit).elems


def _fisher(x: Tensor, weights: Tensor | None, unit: UnitSpec) -> Tensor:
    """Root of the mean of x², the empirical Fisher information; the root keeps it from overflowing."""
    largest = x.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    return largest * ((x / largest[:, None]).square().sum(dim=1) / blocks_of(unit).elems).sqrt()


def _magnitude(x: Tensor, weights: Tensor | None, unit: UnitSpec) -> Tensor:
    """Mean of |x|."""
    return x.abs().sum(dim=1) / blocks_of(unit).elems


WITH_WEIGHTS: Mapping[str, Score] = {"significance": _significance, "product": _product}
WITHOUT_WEIGHTS: Mapping[str, Callable[[Tensor, Tensor | None, UnitSpec], Tensor]] = {
    "fisher": _fisher,
    "magnitude": _magnitude,
}
SCORES = (*WITH_WEIGHTS, *WITHOUT_WEIGHTS)


def score(name: str, x: Tensor, weights: Tensor | None, unit: UnitSpec) -> Tensor:
    """One score per block of ``x`` (blocks, 256). Without ``weights`` the magnitude stands in for scores that need them."""
    if name in WITH_WEIGHTS and weights is not None:
        return WITH_WEIGHTS[name](x, weights, unit)
    return WITHOUT_WEIGHTS.get(name, _magnitude)(x, weights, unit)
