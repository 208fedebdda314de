"""Several ranks in the simulator, step after step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import simulate
from thinwire.comm.merge import merge
from thinwire.core import Compressor, Exchange, Exchanged, Request, State, Step, TensorSpec, UnitSpec
from thinwire.exchange import states
from thinwire.fusion.groups import Group, make_group


@dataclass(frozen=True)
class Round:
    """One step of one unit; each list has one entry per rank."""

    inputs: list[Tensor]
    before: list[State]
    before_copies: list[State]
    results: list[Exchanged]
    sent_bytes: list[int]
    asked: list[tuple[Request, ...]]  # by the first rank, round by round


def run_unit(
    compressor: Compressor, unit: UnitSpec, gradients: Sequence[Sequence[Tensor]], first_step: int = 0
) -> list[Round]:
    """Exchange one unit from its initial state; ``gradients[step][rank]``."""
    world_size = len(gradients[0])
    states = [compressor.init(unit) for _ in range(world_size)]
    rounds = []
    for index, inputs in enumerate(gradients, start=first_step):
        sent = [0] * world_size
        copies = [{key: value.clone() for key, value in state.items()} for state in states]
        exchanges = [
            compressor.exchange(inputs[rank].clone(), states[rank], Step(index, unit, rank, world_size))
            for rank in range(world_size)
        ]
        asked: list[tuple[Request, ...]] = []
        results = simulate([_noted(exchanges[0], asked), *exchanges[1:]], sent=sent)
        rounds.append(Round(list(inputs), states, copies, results, sent, asked))
        states = [result.state for result in results]
    return rounds


def _noted(exchange: Exchange, asked: list[tuple[Request, ...]]) -> Exchange:
    reply: Any = None
    while True:
        try:
            request = exchange.send(reply)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        asked.append(request if isinstance(request, tuple) else (request,))
        reply = yield request


class World:
    """Ranks that exchange whole groups and keep their state by name, as a channel does at rest.

    Attributes:
        at_rest: by rank, the state of every tensor by name.
    """

    def __init__(self, tensors: Sequence[TensorSpec], compressor: Compressor, world_size: int) -> None:
        self.compressor, self.world_size = compressor, world_size
        self.tensors = tuple(tensors)
        self.at_rest = [states.initial(tensors, compressor) for _ in range(world_size)]
        self.index = 0

    def group(self, tensors: Sequence[TensorSpec]) -> Group:
        return make_group(tensors, self.compressor)

    def step(self, groups: Sequence[Group], gradients: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Exchange all groups; ``gradients[rank]`` and the returned means are flat and by name."""
        means: list[dict[str, Tensor]] = [{} for _ in range(self.world_size)]
        for group in groups:
            bound = [states.bind([group], at_rest) for at_rest in self.at_rest]
            merged = [
                merge(self._exchanges(group, rank, by_unit, gradients[rank])) for rank, (by_unit, _) in enumerate(bound)
            ]
            for rank, results in enumerate(simulate(merged)):
                for unit, result in zip(group.units, results, strict=True):
                    names = [tensor.fqn for tensor in unit.spec.tensors]
                    means[rank].update(zip(names, result.mean.split(unit.spec.sizes), strict=True))
                new = {unit: result.state for unit, result in zip(group.units, results, strict=True)}
                self.at_rest[rank].update(states.at_rest(new, bound[rank][1]))
        self.index += 1
        return means

    def load(self, rank: int, at_rest: states.ByName) -> None:
        """Go on from saved states, checked as a checkpoint's are."""
        states.check(at_rest, {}, self.tensors, self.compressor)
        self.at_rest[rank] = at_rest

    def _exchanges(
        self, group: Group, rank: int, by_unit: states.ByUnit, gradients: dict[str, Tensor]
    ) -> list[Exchange]:
        exchanges = []
        for unit in group.units:
            x = torch.cat([gradients[tensor.fqn] for tensor in unit.spec.tensors])
            step = Step(self.index, unit.spec, rank, self.world_size)
            exchanges.append(unit.compressor.exchange(x, by_unit[unit], step))
        return exchanges
