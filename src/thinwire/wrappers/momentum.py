"""Momentum correction: Lin et al., Deep Gradient Compression (ICLR'18), section 3.2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core import (
    ELEMENTWISE,
    Compressor,
    ConfigError,
    Exchange,
    Layout,
    State,
    Step,
    UnitSpec,
    Wrapper,
    make,
    register,
)


@register("momentum")
@dataclass(frozen=True, kw_only=True)
class MomentumCorrection(Wrapper):
    """Accumulate momentum before sending: u = mu·u + g goes to the wire, so delayed entries carry their own momentum.

    Use it with an optimizer *without* momentum (SGD with momentum 0): the momentum is in what arrives. Conservation holds
    for u, not for g.

    Args:
        mu: the momentum coefficient, as in SGD.
    """

    mu: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.mu < 1:
            raise ConfigError(f"momentum: mu is {self.mu}; expected 0 or more and below 1, for example mu=0.9")

    def init(self, unit: UnitSpec) -> State:
        device = unit.tensors[0].device if unit.tensors else torch.device("cpu")
        return {"velocity": torch.zeros(unit.numel, device=device), **self.inner.init(unit)}

    def layout(self) -> Mapping[str, Layout]:
        return {"velocity": ELEMENTWISE, **self.inner.layout()}

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        # A new tensor: the old velocity must survive a skipped step, and the inner exchange may overwrite x.
        velocity = torch.add(x, state["velocity"], alpha=self.mu)
        done = yield from self.inner.exchange(x.copy_(velocity), self.inner_state(state), step)
        return done._replace(state={"velocity": velocity, **done.state})

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(inner=make("ef | topk(density=0.1)")), cls(inner=make("int4"))]
