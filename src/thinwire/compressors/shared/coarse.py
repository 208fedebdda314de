"""One and two bits per value: the mean has a residual of its own, and padding does not weaken the scale of a tensor's end.

Both differ from the other block formats (``blockwise``) because the error of one encoding is no longer small. There, what
the owner of a shard loses when it encodes the mean goes, times the world size W, into its own residual, and from there
through the first round again. Here it is added to the next *mean* of the same shard: q_i being what rank i sent,

    w = 1/W · sum_i q_i + m/W;   d = C(w), which all apply;   m = W·(w - d)

m is kept instead of m/W because it is then like any residual: gradient of this rank that waits, whose mean over the ranks is
what is missing. So where fusion groups, layer selection or the world change who owns an element, its former owner adds m to
what it sends itself, and nothing is lost. A rank keeps m for the whole unit, zero where it owns nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.shared.blockwise import Blockwise, average_shard, shard_elems, share_shards
from thinwire.compressors.shared.coders import Coder, FormatCoder, Written
from thinwire.core import RESIDUAL, AllToAll, Exchange, Exchanged, Layout, State, Step, UnitSpec, memory
from thinwire.core.blocks import aligned_elems, from_blocks, to_blocks

MEAN_RESIDUAL = "mean_residual"


class Coarse(Blockwise):
    """A format whose scale is the mean magnitude of a block. Without a state (as values of a sparsifier that has residuals of
    its own) it feeds the error of the mean back as the other block formats do."""

    feedback = True

    def init(self, unit: UnitSpec) -> State:
        return {MEAN_RESIDUAL: torch.zeros(unit.numel, device=unit.device)}

    def layout(self) -> Mapping[str, Layout]:
        return {MEAN_RESIDUAL: RESIDUAL}

    @property
    def rounds(self) -> int | None:
        return 2

    def coder(self, unit: UnitSpec) -> Coder:
        return _CoarseCoder(self.format, unit.sizes)

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        if not x.numel() or MEAN_RESIDUAL not in state:
            return (yield from super().exchange(x, state, step))
        unit, world, block = step.unit, step.world_size, self.format.block
        coder, shard = self.coder(unit), shard_elems(aligned_elems(unit, block), world, block)
        own = slice(step.rank * shard, (step.rank + 1) * shard)
        u, waiting = (memory.padded(to_blocks(one, unit, block), shard * world) for one in (x, state[MEAN_RESIDUAL]))
        _add_unowned(u, waiting, own)
        sent = coder.write(u, 0, world, None, step.residual)
        if not sent.finite:
            step.refuse(sent.residual)
        received = yield AllToAll.of(sent.headroom)
        mean = average_shard(received, coder, step, shard, x.device).add_(waiting[own], alpha=1 / world)
        nothing = memory.zeros(shard * world, device=x.device)
        whole, lost = yield from share_shards(mean, nothing, coder, step)
        mean, residual, waiting = (from_blocks(one, unit, block) for one in (whole, sent.residual, lost))
        return Exchanged(mean, residual, {MEAN_RESIDUAL: waiting})


def _add_unowned(u: Tensor, waiting: Tensor, own: slice) -> None:
    """What this rank keeps for means that others form now becomes part of what it sends; after most steps there is none."""
    before, _, behind = kernels.segment_amax(waiting, (0, own.start, own.stop, waiting.numel())).tolist()
    if before or behind:
        u[: own.start] += waiting[: own.start]
        u[own.stop :] += waiting[own.stop :]


@dataclass(frozen=True)
class _CoarseCoder(FormatCoder):
    """Padding gets the mean magnitude of the values before it: zeros would lower the scale of a short tensor, which then
    would need many steps to arrive (a scalar 64)."""

    sizes: tuple[int, ...]

    def write(
        self, x: Tensor, first: int, rows: int, generator: torch.Generator | None, residual: Tensor | None = None
    ) -> Written:
        _fill_padding(x.view(-1, self.format.block), first // self.format.block, self.sizes)
        return super().write(x, first, rows, generator, residual)


def _fill_padding(blocks: Tensor, first: int, sizes: tuple[int, ...]) -> None:
    """``blocks`` are those of the aligned unit from number ``first`` on."""
    numbers, lengths = _partial_blocks(sizes, blocks.shape[1])
    some = slice(bisect_left(numbers, first), bisect_left(numbers, first + len(blocks)))
    if not numbers[some]:
        return
    at = torch.tensor(numbers[some], device=blocks.device) - first
    length = torch.tensor(lengths[some], device=blocks.device)[:, None]
    values = blocks[at]
    inside = torch.arange(blocks.shape[1], device=blocks.device) < length
    mean = torch.where(inside, values.abs() / length, 0.0).sum(dim=1, keepdim=True)
    blocks[at] = torch.where(inside, values, mean)


@lru_cache(maxsize=256)
def _partial_blocks(sizes: tuple[int, ...], block: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The blocks of the aligned unit that end in padding, and how many values each has."""
    found, end = [], 0
    for size in sizes:
        end += -(-size // block)
        if size % block:
            found.append((end - 1, size % block))
    return tuple(number for number, _ in found), tuple(length for _, length in found)
