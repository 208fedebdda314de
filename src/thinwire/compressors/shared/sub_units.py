"""Parts of a unit: tensors that are treated alike in a step, cut out of the flat buffer and put back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core import UnitSpec, memory


def device_of(unit: UnitSpec) -> torch.device:
    """Where a unit lives; all its tensors are on one device."""
    return unit.tensors[0].device if unit.tensors else torch.device("cpu")


@dataclass(frozen=True)
class SubUnit:
    """Some tensors of ``whole``, in their order there."""

    whole: UnitSpec
    members: tuple[int, ...]

    @property
    def unit(self) -> UnitSpec:
        if self._is_whole:
            return self.whole
        return UnitSpec(tuple(self.whole.tensors[member] for member in self.members))

    @property
    def _is_whole(self) -> bool:
        return len(self.members) == len(self.whole.tensors)

    def take(self, x: Tensor) -> Tensor:
        """The members' part of ``x``: a copy, or ``x`` itself if all are members."""
        if self._is_whole:
            return x
        parts = x.split(self.whole.sizes)
        return memory.cat([parts[member] for member in self.members])

    def put(self, part: Tensor, x: Tensor) -> Tensor:
        """``part`` written to its places in ``x``; ``part`` itself if all are members."""
        if self._is_whole:
            return part
        targets = x.split(self.whole.sizes)
        for member, values in zip(self.members, part.split(self.unit.sizes), strict=True):
            targets[member].copy_(values)
        return x


def sub_units(unit: UnitSpec, kinds: Sequence[Hashable]) -> dict[Hashable, SubUnit]:
    """One part for each kind, given the kind of each tensor; in order of first appearance."""
    members: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        members.setdefault(kind, []).append(index)
    return {kind: SubUnit(unit, tuple(indices)) for kind, indices in members.items()}
