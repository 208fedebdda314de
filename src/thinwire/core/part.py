"""Some tensors of a unit, treated apart from the others: cut out of flat buffers and of states, and put back."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from thinwire.core import memory
from thinwire.core.compressor import Compressor, Exchange, Layout, State, Step
from thinwire.core.spec import UnitSpec

_Kind = TypeVar("_Kind", bound=Hashable)


@dataclass(frozen=True)
class Part:
    """The tensors of ``whole`` with these numbers, in ascending order."""

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

    def take(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """The members' part of ``x``, of which each tensor of the whole has ``sizes``; ``x`` itself if all are members."""
        if self._is_whole:
            return x
        pieces = x.split(list(self.whole.sizes if sizes is None else sizes))
        return memory.cat([pieces[member] for member in self.members]) if self.members else x[:0]

    def put(self, part: Tensor, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """``part`` written to its places in ``x``; ``part`` itself if all are members."""
        if self._is_whole:
            return part
        lengths = list(self.whole.sizes if sizes is None else sizes)
        places = x.split(lengths)
        for member, values in zip(self.members, part.split([lengths[m] for m in self.members]), strict=True):
            places[member].copy_(values)
        return x

    def take_state(self, state: State, layouts: Mapping[str, Layout]) -> State:
        """The members' part of these keys of a state."""
        return {key: self.take(state[key], self._lengths(layout)) for key, layout in layouts.items()}

    def put_state(self, part: State, state: State, layouts: Mapping[str, Layout]) -> State:
        """These keys of ``state`` with the members' part replaced; ``state`` stays as it was."""
        return {
            key: self.put(part[key], state[key] if self._is_whole else state[key].clone(), self._lengths(layout))
            for key, layout in layouts.items()
        }

    def _lengths(self, layout: Layout) -> list[int]:
        return [layout.numel(tensor) for tensor in self.whole.tensors]

    def exchange(self, compressor: Compressor, x: Tensor, state: State, step: Step) -> Exchange:
        """The exchange of the members alone; ``x``, ``state`` and ``step`` are those of the whole."""
        all_weights = step.weights
        weights = None if all_weights is None else lambda: self.take(all_weights())
        importance = None if step.importance is None else self.take(step.importance)
        own = replace(step, unit=self.unit, weights=weights, importance=importance)
        return compressor.exchange(self.take(x), self.take_state(state, compressor.layout()), own)


def parts_by_kind(unit: UnitSpec, kinds: Sequence[_Kind]) -> dict[_Kind, Part]:
    """One part for each kind, given the kind of each tensor; in order of first appearance."""
    members: dict[_Kind, list[int]] = {}
    for index, kind in enumerate(kinds):
        members.setdefault(kind, []).append(index)
    return {kind: Part(unit, tuple(indices)) for kind, indices in members.items()}
