"""Units that have broken compressors before: empty, scalar, zero, subnormal, huge, of unlike magnitudes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core import TensorSpec, UnitSpec

Fill = Callable[[torch.Generator, tuple[int, ...]], Tensor]


def normal(scale: float = 1.0) -> Fill:
    """Independent normal values of this magnitude."""
    return lambda generator, shape: torch.randn(shape, generator=generator) * scale


def _constant(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, 0.25)


def _ties(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Few distinct magnitudes, so that a selection has to break ties."""
    return torch.randint(-2, 3, shape, generator=generator).float()


def _low_rank(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    rows, columns = shape
    return torch.randn(rows, 2, generator=generator) @ torch.randn(2, columns, generator=generator)


@dataclass(frozen=True)
class Specimen:
    """A unit and what its gradients look like.

    Args:
        parts: shape and filling of each tensor.
        only_rank: the others then have zero gradients.
    """

    name: str
    parts: tuple[tuple[tuple[int, ...], Fill], ...]
    only_rank: int | None = None

    @property
    def unit(self) -> UnitSpec:
        return UnitSpec(tuple(TensorSpec(f"{self.name}.{i}", shape) for i, (shape, _) in enumerate(self.parts)))

    def gradient(self, rank: int, step: int) -> Tensor:
        """A flat gradient that differs between ranks and steps and is the same in every run."""
        if self.only_rank not in (None, rank):
            return torch.zeros(self.unit.numel)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.name}/{rank}/{step}".encode()))
        return torch.cat([fill(generator, shape).reshape(-1) for shape, fill in self.parts])


def _one(name: str, shape: tuple[int, ...], fill: Fill, only_rank: int | None = None) -> Specimen:
    return Specimen(name, ((shape, fill),), only_rank)


_UNLIKE = Specimen(
    "unlike",
    (
        ((33, 17), normal()),
        ((), normal()),
        ((0,), normal()),
        ((5,), normal(1e-6)),
        ((129,), normal(1e4)),
        ((7, 3, 3, 3), normal(1e-3)),
    ),
)
MENAGERIE = (
    _one("scalar", (), normal()),
    _one("empty", (0,), normal()),
    _one("empty_matrix", (4, 0), normal()),
    _one("one_element", (1,), normal()),
    _one("zeros", (40, 30), normal(0.0)),
    _one("constant", (700,), _constant),
    _one("subnormal", (300,), normal(1e-40)),
    _one("huge", (20, 30), normal(1e30)),
    _one("ties", (257,), _ties),
    _one("prime", (1021,), normal(0.1)),
    _one("low_rank", (64, 48), _low_rank),
    _one("conv", (16, 8, 3, 3), normal()),
    _one("one_rank_only", (30, 20), normal(), only_rank=0),
    _UNLIKE,
)
BY_NAME = {specimen.name: specimen for specimen in MENAGERIE}
