"""Units whose tensors begin at block boundaries.

Values of a block share a scale. If a block held the end of one tensor and the beginning of another, the larger one
would set the scale and the smaller one would be rounded to nothing; so every tensor is padded to whole blocks. Most
weights already are.
"""

from __future__ import annotations

from torch import Tensor

from thinwire.core import memory
from thinwire.core.spec import UnitSpec


def aligned_elems(unit: UnitSpec, block: int) -> int:
    """Elements of the unit when every tensor is padded to whole blocks."""
    return sum(-(-size // block) * block for size in unit.sizes)


def to_blocks(x: Tensor, unit: UnitSpec, block: int) -> Tensor:
    """``x`` with every tensor padded; ``x`` itself where nothing is to pad."""
    if is_aligned(unit, block):
        return x
    whole = memory.zeros(aligned_elems(unit, block), device=x.device)
    for part, place in zip(x.split(unit.sizes), _places(whole, unit, block), strict=True):
        place.copy_(part)
    return whole


def from_blocks(aligned: Tensor, unit: UnitSpec, block: int) -> Tensor:
    """Without the padding of ``to_blocks``, and without anything behind it."""
    if is_aligned(unit, block):
        return aligned[: unit.numel]
    return memory.cat(_places(aligned, unit, block))


def _places(aligned: Tensor, unit: UnitSpec, block: int) -> list[Tensor]:
    """Where the tensors are in the padded unit."""
    padded = [-(-size // block) * block for size in unit.sizes]
    parts = aligned[: sum(padded)].split(padded)
    return [part[:size] for part, size in zip(parts, unit.sizes, strict=True)]


def is_aligned(unit: UnitSpec, block: int) -> bool:
    """Whether every tensor begins at a block boundary. The last one may end anywhere: nothing comes after it."""
    return all(size % block == 0 for size in unit.sizes[:-1])
