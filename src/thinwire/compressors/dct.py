"""DCT top-k, after Peng et al., DeMo: Decoupled Momentum Optimization (2024)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.shared.places import Places, row_places
from thinwire.compressors.shared.sparse import Sparsifier, check_density
from thinwire.core import Compressor, ConfigError, Payload, Schedule, Step, UnitSpec, register
from thinwire.kernels import Selected


@register("dct")
@dataclass(frozen=True, kw_only=True)
class DCT(Sparsifier):
    """Send the largest coefficients of every block's cosine transform: one number moves a whole block of weights.

    y = D·c for every block of ``block`` neighbours of a tensor (D orthonormal, DCT-II); the k = max(1, floor(density·block))
    largest |y| of each block are sent; mean = Dᵀ·mean(sent y), and the residual c - Dᵀ·(sent y) stays in the domain of the
    weights. DeMo transforms square chunks of matrices and feeds a decoupled momentum; here blocks are runs of the
    flattened tensor (the last one may be shorter) and error feedback takes the place of the momentum.

    Args:
        density: fraction of the coefficients to send; at least 1/block, since every block sends one.
        block: neighbours that are transformed together. Higher: lower densities are possible; costs block·n operations.
    """

    scheduled = ("density",)

    density: float = 1 / 32
    block: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        if self.block < 2:
            raise ConfigError(f"dct: block is {self.block}; expected 2 or more, for example 64")
        lowest = min(self.density.bounds) if isinstance(self.density, Schedule) else self.density
        if lowest * self.block < 1:
            raise ConfigError(
                f"dct: density {lowest} of blocks of {self.block} is less than one coefficient each; "
                f"use density={1 / self.block:g} or more, or block={math.ceil(1 / lowest)} or more"
            )

    @property
    def sparse(self) -> bool:
        """A coefficient spreads over its whole block, so zeros in the mean say nothing."""
        return False

    def split(self, x: Tensor, step: Step) -> tuple[Payload, Tensor]:
        payload, unsent = super().split(self._transformed(x, step.unit), step)
        del unsent  # the same error in the other domain, where it has not met the rounding of the way back
        return payload, x.sub_(self.decode(payload, step.unit))

    def select(self, x: Tensor, step: Step) -> Selected:
        """Choose among coefficients."""
        return kernels.row_topk(x, None, step.unit.offsets, *self._rows(step.unit), out=x)

    def places(self, unit: UnitSpec) -> Places:
        device = unit.tensors[0].device if unit.tensors else torch.device("cpu")
        return row_places(unit.offsets, *self._rows(unit), device)

    def decode(self, payload: Payload, unit: UnitSpec) -> Tensor:
        return self._transformed(super().decode(payload, unit), unit, back=True)

    def combine(self, payloads: Sequence[Payload], step: Step) -> Tensor:
        return self._transformed(super().combine(payloads, step), step.unit, back=True)

    def selected_elems(self, unit: UnitSpec) -> int:
        k = self._per_block
        return sum(size // self.block * k + min(k, size % self.block) for size in unit.sizes)

    @property
    def _per_block(self) -> int:
        return int(self.density * self.block)

    def _rows(self, unit: UnitSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
        tensors = len(unit.tensors)
        return (self.block,) * tensors, (self._per_block,) * tensors

    def _transformed(self, x: Tensor, unit: UnitSpec, *, back: bool = False) -> Tensor:
        """Coefficients of every block, or with ``back`` the values they stand for."""
        out = torch.empty_like(x)
        for start, stop in zip(unit.offsets, unit.offsets[1:], strict=False):
            cut = stop - (stop - start) % self.block
            for first, last, length in ((start, cut, self.block), (cut, stop, stop - cut)):
                if first < last:
                    basis = _basis(length, x.device)
                    torch.mm(
                        x[first:last].view(-1, length), basis if back else basis.T, out=out[first:last].view(-1, length)
                    )
        return out

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(), cls(density=0.125, block=32, values="int8")]


@lru_cache(maxsize=256)  # a basis per length of a last block, which differs between tensors
def _basis(length: int, device: torch.device) -> Tensor:
    """The orthonormal DCT-II: row i holds sqrt(2/n)·cos(π·i·(2j + 1)/(2n)), row 0 divided by sqrt(2)."""
    order = torch.arange(length, dtype=torch.float64)
    basis: Tensor = (math.pi / (2 * length) * order[:, None] * (2 * order[None] + 1)).cos() * math.sqrt(2 / length)
    basis[0] /= 2**0.5
    return basis.float().to(device)
