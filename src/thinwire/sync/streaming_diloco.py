"""Streaming DiLoCo: Douillard et al., Streaming DiLoCo with overlapping communication (2025), algorithm 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.sync.diloco import DiLoCo
from thinwire.sync.local_steps import Numbers
from thinwire.sync.pieces import Piece, cut


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(DiLoCo):
    """DiLoCo fragment by fragment: each every ``h`` steps, in turn, its mean mixed into weights that went on meanwhile.

    Fragments are runs of whole tensors of about equal size; the paper takes every n-th block.

    Args:
        fragments: how many; more: smaller peaks on the link.
        delay: steps that an exchange may take; the paper has 1 to 5.
        mix: α in x = α x + (1 - α) A'; 0 drops the steps taken meanwhile.
    """

    fragments: int = 4
    delay: int = 1
    mix: float = 0.5
    compress: str = "int4"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("fragments", 1 <= self.fragments <= self.h, "from 1 to h")
        self._require("mix", 0 <= self.mix <= 1, "from 0 to 1")

    def cut(self, tensors: Mapping[str, Tensor]) -> list[list[Piece]]:
        return cut(tensors, self.fragments, whole=True)

    def begin(self) -> Numbers:
        return {}

    def due(self, step: int, numbers: Numbers) -> Sequence[int]:
        offsets = [self.h * fragment // self.fragments for fragment in range(self.fragments)]
        return [fragment for fragment, offset in enumerate(offsets) if step > offset and (step - offset) % self.h == 0]

    def merge(self, weights: Tensor, new: Tensor, snapshot: Tensor, mean: Tensor) -> None:
        weights.mul_(self.mix).add_(new, alpha=1 - self.mix)
