"""Sparse vectors as (position, value) pairs, and how sparse collectives join, cut and send them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import AllToAll, Request, Step, UnitSpec

ENTRY_BYTES = 8  # an int32 position and an fp32 value
_NOTHING = -1  # the position of padding


class Entries(NamedTuple):
    """Entries of a flat unit in ascending order of position, each position once."""

    indices: Tensor  # int32
    values: Tensor  # fp32

    def take(self, chosen: Tensor) -> Entries:
        """The entries at these places in the list, or where this mask is true."""
        return Entries(self.indices[chosen], self.values[chosen])

    def bounds(self, borders: Sequence[int]) -> tuple[int, ...]:
        """Where in the list the entries from each of these ascending positions on begin."""
        wanted = torch.tensor(borders, dtype=torch.int32, device=self.indices.device)
        return tuple(torch.searchsorted(self.indices, wanted).tolist())

    def largest(self, unit: UnitSpec, ks: Sequence[int]) -> Entries:
        """The ``ks[t]`` largest of each tensor, or all where there are fewer; ties go to the lowest position."""
        bounds = self.bounds(unit.offsets)
        fitting = [min(k, stop - start) for k, start, stop in zip(ks, bounds, bounds[1:], strict=False)]
        return self.take(kernels.ef_topk(self.values, None, bounds, fitting).indices.long())


def summed(indices: Tensor, values: Tensor) -> Entries:
    """Entries from pairs in any order; values at the same position are added in the order given."""
    positions, place = torch.unique(indices, return_inverse=True)
    return Entries(positions, torch.zeros(positions.numel(), device=values.device).index_add_(0, place, values))


def contains(positions: Tensor, sought: Tensor) -> Tensor:
    """For each of ``sought``, whether it is among ``positions`` (ascending)."""
    if not positions.numel():
        return torch.zeros_like(sought, dtype=torch.bool)
    places = torch.searchsorted(positions, sought).clamp(max=positions.numel() - 1)
    return positions[places] == sought


def to_rows(entries: Entries, bounds: Sequence[int], width: int) -> Tensor:
    """Bytes of the entries between each two neighbours of ``bounds``, a row each, padded to ``width`` entries."""
    rows = torch.full((len(bounds) - 1, width, 2), _NOTHING, dtype=torch.int32, device=entries.indices.device)
    pairs = torch.stack([entries.indices, entries.values.view(torch.int32)], dim=1)
    for row, start, stop in zip(rows, bounds, bounds[1:], strict=False):
        row[: stop - start] = pairs[start:stop]
    return rows.view(len(bounds) - 1, -1).view(torch.uint8)


def from_rows(rows: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Positions and values in all rows, in their order, without the padding."""
    pairs = torch.cat([_numbers(row) for row in rows]).view(-1, 2)
    pairs = pairs[pairs[:, 0] != _NOTHING]
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous().view(torch.float32)


def swap(message: Tensor, partners: Sequence[int], step: Step) -> Generator[Request, Any, Tensor]:
    """Exchange equally long messages (int32) in pairs: rank r gets what ``partners[r]`` gave.

    The rows of an all-to-all have equal lengths, so a row for the partner alone would send as much to everybody else.
    Instead each rank deals its message out to all, and each passes on what it holds for a pair: two all-to-alls of
    1/p of the message per row, hence twice the message in all, whatever p is. Two ranks exchange directly.
    """
    world_size = step.world_size
    if world_size == 2:
        rows = yield AllToAll(message.expand(2, -1).contiguous().view(torch.uint8))
        return _numbers(rows[partners[step.rank]])
    length = message.numel()
    dealt = torch.nn.functional.pad(message, (0, share_elems(length, world_size) * world_size - length))
    held = yield AllToAll(dealt.view(world_size, -1).view(torch.uint8))
    passed_on = yield AllToAll(torch.stack([held[partner] for partner in partners]))
    return torch.cat([_numbers(row) for row in passed_on])[:length]


def swap_bytes(length: int, world_size: int) -> int:
    """What one rank sends in a ``swap`` of ``length`` int32 numbers."""
    if world_size == 2:
        return 4 * length
    return 2 * (world_size - 1) * 4 * share_elems(length, world_size)


def share_elems(length: int, world_size: int) -> int:
    """Numbers per row when a message is dealt out to all ranks."""
    return -(-length // world_size)


def _numbers(row: Tensor) -> Tensor:
    """Bytes as int32; copied, because a row may begin anywhere in a larger message."""
    return row.clone().view(torch.int32)
