"""One method on given gradients: what it was offered, what it left behind, what arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from benchmarks.convergence.tasks import WORKERS
from benchmarks.sparsifiers.budget import innermost
from benchmarks.sparsifiers.stream import Sample
from torch import Tensor

from thinwire.comm import simulate
from thinwire.compressors.dgc import DGC
from thinwire.core import Compressor, State, Step, TensorSpec, UnitSpec, make, residual_key
from thinwire.fusion.groups import make_group
from thinwire.fusion.prepare import prepare
from thinwire.wrappers import with_feedback


@dataclass(frozen=True, eq=False)
class Lane:
    """Tensors that a compressor sees as one unit: as tensors of their own or, fused, as one long vector."""

    members: tuple[TensorSpec, ...]
    unit: UnitSpec
    compressor: Compressor


def routed(tensors: Sequence[TensorSpec], spec: str) -> list[Lane]:
    """As an attached model sends them: small tensors and vectors dense."""
    units = make_group(tensors, prepare(spec)).units
    return [Lane(unit.spec.tensors, unit.spec, unit.compressor) for unit in units]


def fused(tensors: Sequence[TensorSpec], spec: str, degree: int) -> list[Lane]:
    """Every ``degree`` neighbours as one vector, vectors and small tensors included."""
    groups = [tuple(tensors[first : first + degree]) for first in range(0, len(tensors), degree)]
    compressor = with_feedback(make(spec))
    return [
        Lane(group, UnitSpec.flat(sum(t.numel for t in group), f"{group[0].fqn}+{len(group)}"), compressor)
        for group in groups
    ]


@dataclass
class Outcome:
    """What became of one step. Lanes that lose nothing count in ``means`` and ``sent_bytes`` only.

    Args:
        means: what arrived, flat, by name.
        offered: the sum over the workers of the magnitudes of gradient and residual, flat, by name.
        offered_energy: the sum of their squares.
        left_energy: that of what is left in the residuals afterwards.
        sent_bytes: of the first rank.
    """

    means: dict[str, Tensor] = field(default_factory=dict)
    offered: dict[str, Tensor] = field(default_factory=dict)
    offered_energy: float = 0.0
    left_energy: float = 0.0
    sent_bytes: int = 0

    @property
    def kept(self) -> float:
        """The part of the energy that was sent."""
        return 1 - self.left_energy / self.offered_energy if self.offered_energy else 1.0


class Method:
    """A compressor with the states of all workers. It does not train anything."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._states = [[lane.compressor.init(lane.unit) for _ in range(WORKERS)] for lane in lanes]

    def exchange(self, sample: Sample) -> Outcome:
        """Send the gradients of one step; the next one goes on from the residuals it leaves."""
        outcome = Outcome()
        for index, lane in enumerate(self._lanes):
            self._states[index] = _exchange(lane, self._states[index], sample, outcome)
        return outcome


def _exchange(lane: Lane, states: list[State], sample: Sample, outcome: Outcome) -> list[State]:
    weights = partial(_flat, lane, sample.weights) if lane.compressor.needs_weights else None
    offered, exchanges, sent = [], [], [0] * WORKERS
    for rank, (gradients, state) in enumerate(zip(sample.gradients, states, strict=True)):
        x = _flat(lane, gradients)
        offered.append(_offered(lane.compressor, x, state))
        exchanges.append(lane.compressor.exchange(x, state, Step(sample.step, lane.unit, rank, WORKERS, 0, weights)))
    results = simulate(exchanges, sent=sent)
    outcome.sent_bytes += sent[0]
    outcome.means.update(_by_name(lane, results[0].mean))
    key = residual_key(lane.compressor.layout())
    left = [result.residual if key is None else result.state[key] for result in results]
    for mine, rest in zip(offered, left, strict=True):
        if rest is not None:
            outcome.offered_energy += float(mine.double().square().sum())
            outcome.left_energy += float(rest.double().square().sum())
    if left[0] is not None:
        outcome.offered.update(_by_name(lane, torch.stack(offered).abs_().sum(dim=0)))
    return [result.state for result in results]


def _offered(compressor: Compressor, x: Tensor, state: State) -> Tensor:
    """What there is to send: the gradient and what has waited; with DGC, the velocity too."""
    inner = innermost(compressor)
    if isinstance(inner, DGC):
        velocity = state["velocity"].masked_fill(state["sent"], 0.0)
        return x + state["residual"] + inner.momentum * velocity
    key = residual_key(compressor.layout())
    return x.clone() if key is None else x + state[key]


def _flat(lane: Lane, values: dict[str, Tensor]) -> Tensor:
    return torch.cat([values[tensor.fqn] for tensor in lane.members])


def _by_name(lane: Lane, flat: Tensor) -> dict[str, Tensor]:
    parts = flat.split([tensor.numel for tensor in lane.members])
    return {tensor.fqn: part for tensor, part in zip(lane.members, parts, strict=True)}
