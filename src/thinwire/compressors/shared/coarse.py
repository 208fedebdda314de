"""One and two bits per value: the mean has a residual of its own, and padding does not weaken the scale of a tensor's end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compressors.shared import mean_feedback
from thinwire.compressors.shared.blockwise import Blockwise, shard_elems
from thinwire.compressors.shared.coders import Coder, FormatCoder, Written
from thinwire.compressors.shared.mean_feedback import MEAN_RESIDUAL
from thinwire.compressors.shared.padding import fill_padding
from thinwire.core import Exchange, Exchanged, Layout, State, Step, UnitSpec, memory
from thinwire.core.blocks import aligned_elems, from_blocks, to_blocks


class Coarse(Blockwise):
    """A format whose scale is the mean magnitude of a block. Without a state (as values of a sparsifier that has residuals of
    its own) it feeds the error of the mean back as the other block formats do."""

    feedback = True

    def init(self, unit: UnitSpec) -> State:
        return mean_feedback.initial_state(unit)

    def layout(self) -> Mapping[str, Layout]:
        return mean_feedback.state_layout()

    @property
    def rounds(self) -> int | None:
        return 2

    def coder(self, unit: UnitSpec) -> Coder:
        return _CoarseCoder(self.format, unit.sizes)

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        if not x.numel() or MEAN_RESIDUAL not in state:
            return (yield from super().exchange(x, state, step))
        unit, world, block = step.unit, step.world_size, self.format.block
        padded = world * shard_elems(aligned_elems(unit, block), world, block)
        u, waiting = (memory.padded(to_blocks(one, unit, block), padded) for one in (x, state[MEAN_RESIDUAL]))
        done = yield from mean_feedback.averaged(u, waiting, self.coder(unit), step)
        mean, residual, waiting = (from_blocks(one, unit, block) for one in done)
        return Exchanged(mean, residual, {MEAN_RESIDUAL: waiting})


@dataclass(frozen=True)
class _CoarseCoder(FormatCoder):
    """Writes padding so that it does not weaken scales."""

    sizes: tuple[int, ...]

    def write(
        self, x: Tensor, first: int, rows: int, generator: torch.Generator | None, residual: Tensor | None = None
    ) -> Written:
        block = self.format.block
        fill_padding(x.view(-1, block), self.sizes, first=first // block)
        return super().write(x, first, rows, generator, residual)
