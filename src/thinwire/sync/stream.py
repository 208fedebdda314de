"""Streamed averaging: never wait. Own method; evidence and limits are in the specification of sync policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.sync.local_steps import LocalSteps, Numbers
from thinwire.sync.pieces import Piece, cut
from thinwire.sync.rate import scale_for

BITS = {4: "int4", 2: "int2", 1: "int1"}  # compressors by bits per value


@dataclass(frozen=True, kw_only=True)
class Stream(LocalSteps):
    """Step locally at once, average one slice of the weights per step in few bits, merge it late into weights that moved on.

    After step t, with the slice f = (t + 1) mod H of elements [N f/H, N (f+1)/H) and the slice g that left d steps ago::

        A' = A[g] + mean of C(S_i - A[g] + e_i);   x[g] += A' - S[g];   A[g] = A'
        S = x[f];   send C(S - A[f] + e[f])

    The same bytes leave in every step, and have d whole steps to travel. Replicas differ by at most H + d steps of their own.

    Args:
        slices: H; more send fewer bytes per step, and replicas drift further apart.
        bits: per value: 4, 2 or 1. Fewer bits and few slices are better than more bits and many slices.
        delay: d; 1 hides an exchange that takes up to a step. Each further one costs quality; at most ``slices``.
        compress: another compressor in place of ``bits``.
        lr_scale: factor of the learning rate; None: √W and at most 2 for Adam and its kin, see ``rate.scale_for``.
    """

    slices: int = 2
    bits: int = 2
    delay: int = 1
    compress: str = ""
    lr_scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("slices", self.slices >= 1, "1 or more")
        self._require("bits", self.bits in BITS, f"one of {', '.join(map(str, BITS))}")
        self._require(
            "delay", 1 <= self.delay <= self.slices, "from 1 to slices: a slice leaves once its last mean is in"
        )

    @property
    def compressor(self) -> str:
        return self.compress or BITS[self.bits]

    def cut(self, tensors: Mapping[str, Tensor]) -> list[list[Piece]]:
        return cut(tensors, self.slices)

    def due(self, step: int, numbers: Numbers) -> Sequence[int]:
        return [(step + 1) % self.slices]

    def rate_factor(self, world_size: int, optimizers: Sequence[torch.optim.Optimizer]) -> float:
        return self.lr_scale or scale_for(world_size, optimizers, rounds=self.slices)
