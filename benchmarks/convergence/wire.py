"""Four workers in one process: real compressors in the simulator, the mean and its ages as an attached wire gives them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import thinwire.api  # noqa: F401  (registers the compressors)
from thinwire.comm.simulate import simulate
from thinwire.core import State, Step, TensorSpec
from thinwire.engine.ages import Ages
from thinwire.engine.base import ParameterSide
from thinwire.fusion.groups import Unit, make_group
from thinwire.fusion.prepare import prepare


class SimulatedWire:
    """Averages the gradients of ``world_size`` workers that share one model."""

    optimizer: torch.optim.Optimizer | None = None  # for compressors that ask it what matters

    def __init__(self, model: nn.Module, compress: str, world_size: int, seed: int) -> None:
        self._parameters = dict(model.named_parameters())
        self._tensors = [TensorSpec(name, tuple(p.shape), p.dtype, p.device) for name, p in self._parameters.items()]
        compressor = prepare(compress)
        self._units = make_group(self._tensors, compressor).units
        self._world_size, self._seed, self._step = world_size, seed, 0
        self._states = [[unit.compressor.init(unit.spec) for unit in self._units] for _ in range(world_size)]
        self.ages = Ages(self._parameters, self._tensors, compressor)
        self.sent = [0] * world_size

    def exchange(self, gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """End a step: the mean of the workers' gradients becomes the model's; returned by name as well."""
        means: dict[str, Tensor] = {}
        for index, unit in enumerate(self._units):
            means |= self._exchange_unit(index, unit, gradients)
        for name, parameter in self._parameters.items():
            parameter.grad = means[name]
        self.ages.end_step(means)
        self._step += 1
        return means

    def _exchange_unit(self, index: int, unit: Unit, gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        exchanges = []
        optimizers = () if self.optimizer is None else (self.optimizer,)
        side = ParameterSide(self._parameters, optimizers)
        weights = partial(side.weights, unit) if unit.compressor.needs_weights else None
        matters = side.importance(unit) if unit.compressor.needs_importance else None
        for rank, mine in enumerate(gradients):
            x = torch.cat([mine[tensor.fqn].reshape(-1) for tensor in unit.spec.tensors])
            step = Step(self._step, unit.spec, rank, self._world_size, self._seed, weights, matters)
            exchanges.append(unit.compressor.exchange(x, self._state(rank, index), step))
        results = simulate(exchanges, sent=self.sent)
        for rank, result in enumerate(results):
            self._states[rank][index] = result.state
        parts = results[0].mean.split(unit.spec.sizes)
        return {t.fqn: part.view(t.shape).clone() for t, part in zip(unit.spec.tensors, parts, strict=True)}

    def _state(self, rank: int, index: int) -> State:
        return self._states[rank][index]
