"""Some tensors of a unit, exchanged by themselves: cut out of flat buffers and of states, and put back."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.core import Compressor, Exchange, Layout, Request, State, Step, UnitSpec

Asking = Generator[Request | tuple[Request, ...], Any, Any]


def device_of(unit: UnitSpec) -> torch.device:
    """Where a unit lives; all its tensors are on one device."""
    return unit.tensors[0].device if unit.tensors else torch.device("cpu")


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
        return torch.cat([pieces[member] for member in self.members]) if self.members else x[:0]

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
        weights, importance = (None if one is None else self.take(one) for one in (step.weights, step.importance))
        own = replace(step, unit=self.unit, weights=weights, importance=importance)
        return compressor.exchange(self.take(x), self.take_state(state, compressor.layout()), own)


def ask(request: Request) -> Asking:
    """One request as an exchange of its own; returns the reply."""
    return (yield request)


def side_by_side(exchanges: Sequence[Asking]) -> Generator[tuple[Request, ...], Any, list[Any]]:
    """Run exchanges in the same rounds, so that they take no longer than the longest; returns their results in order."""
    results: list[Any] = [None] * len(exchanges)
    replies: dict[int, Any] = dict.fromkeys(range(len(exchanges)))
    while True:
        asked: dict[int, Request | tuple[Request, ...]] = {}
        for index, reply in replies.items():
            try:
                asked[index] = exchanges[index].send(reply)
            except StopIteration as stop:
                results[index] = stop.value
        if not asked:
            return results
        answers = iter((yield tuple(r for one in asked.values() for r in (one if isinstance(one, tuple) else (one,)))))
        replies = {
            index: tuple(next(answers) for _ in one) if isinstance(one, tuple) else next(answers)
            for index, one in asked.items()
        }
