"""What wrappers share that give every tensor a density of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.core import (
    AllReduce,
    Compressor,
    ConfigError,
    Exchange,
    Exchanged,
    Layout,
    State,
    Step,
    TensorSpec,
    UnitSpec,
    Wrapper,
)
from thinwire.core.part import Part, parts_by_kind
from thinwire.core.side_by_side import ask, side_by_side
from thinwire.wrappers.density import check_has_density, has_density, with_density


@dataclass(frozen=True, kw_only=True)
class PerLayerDensity(Wrapper):
    """Base: subclasses say which density each tensor has, and revise that from numbers that all ranks agree on.

    Tensors of equal density are exchanged together, all densities in the same round. The density of the wrapped
    compressor itself is not used.
    """

    def __post_init__(self) -> None:
        check_has_density(self.name, self.inner)
        taken = sorted(self.own_layout().keys() & self.inner.layout().keys())
        if taken:
            raise ConfigError(f"{self.name} cannot be used twice in one compressor; write it once")

    @abstractmethod
    def densities(self, state: State, unit: UnitSpec) -> list[float]:
        """Of each tensor in this step, from replicated state only."""

    @abstractmethod
    def observe(self, x: Tensor, state: State, step: Step) -> tuple[Tensor | None, State]:
        """What is to be averaged over the ranks (fp32), if anything, and own state; before ``x`` is used up."""

    @abstractmethod
    def decide(self, agreed: Tensor, state: State, step: Step) -> State:
        """Own state from what the ranks have agreed on; ``state`` includes what ``observe`` has returned."""

    @abstractmethod
    def own_layout(self) -> Mapping[str, Layout]:
        """Own state, apart from that of the wrapped compressor."""

    @abstractmethod
    def own_state(self, unit: UnitSpec) -> State:
        """That state before the first step."""

    @property
    def exact_bytes(self) -> bool:
        return False

    def init(self, unit: UnitSpec) -> State:
        return {**self.own_state(unit), **self.inner.init(unit)}

    def layout(self) -> Mapping[str, Layout]:
        return {**self.own_layout(), **self.inner.layout()}

    def route(self, tensor: TensorSpec) -> Compressor:
        routed = self.inner.route(tensor)
        if routed is self.inner:
            return self
        return replace(self, inner=routed) if has_density(routed) else routed

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        now = self.at(step.index)
        parts = parts_by_kind(step.unit, now.densities(state, step.unit))
        measured, own = now.observe(x, state, step)
        talks = [part.exchange(with_density(self.inner, d), x, state, step) for d, part in parts.items()]
        if measured is not None:
            talks.append(ask(AllReduce(measured)))
        results = yield from side_by_side(talks)
        if measured is not None:
            own = {**own, **now.decide(results.pop(), {**state, **own}, step)}
        mean, residual, inner = self._joined(list(parts.values()), results, x, state)
        return Exchanged(mean, residual, {**own, **inner})

    def _joined(
        self, parts: Sequence[Part], results: Sequence[Exchanged], x: Tensor, state: State
    ) -> tuple[Tensor, Tensor | None, State]:
        mean, residual, inner = torch.zeros_like(x), None, self.inner_state(state)
        for part, done in zip(parts, results, strict=True):
            mean = part.put(done.mean, mean)
            inner = part.put_state(done.state, inner, self.inner.layout())
            if done.residual is not None:
                residual = part.put(done.residual, torch.zeros_like(x) if residual is None else residual)
        return mean, residual, inner
