"""Error feedback: Seide et al., 1-Bit SGD (Interspeech'14); Karimireddy et al. (ICML'19)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import (
    RESIDUAL,
    Compressor,
    ConfigError,
    Exchange,
    Exchanged,
    Layout,
    State,
    Step,
    UnitSpec,
    Wrapper,
    make,
    register,
)


@register("ef")
@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Wrapper):
    """What was not sent is added to the next gradient: c = g + decay·e; send C(c); e = c - C(c).

    Wrapped around every compressor that needs it without being asked; ``noef`` turns it off.

    Args:
        decay: below 1 the residual fades, which forgets part of the gradient (conservation no longer holds).
    """

    maturity = "stable"

    decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"ef: decay is {self.decay}; expected a number from 0 (forget all) to 1 (keep all)")

    def init(self, unit: UnitSpec) -> State:
        device = unit.tensors[0].device if unit.tensors else torch.device("cpu")
        return {"residual": torch.zeros(unit.numel, device=device), **self.inner.init(unit)}

    def layout(self) -> Mapping[str, Layout]:
        return {"residual": RESIDUAL, **self.inner.layout()}

    @property
    def checks_finite(self) -> bool:
        return True

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        # Kernels that add the residual while they encode add all of it: a decay needs a pass of its own.
        if self.decay == 1.0 and self.inner.adds_residual(step):
            step = replace(step, residual=state["residual"])
        else:
            _, finite = kernels.compensate(x, state["residual"], decay=self.decay, out=x)
            if not finite:
                step.refuse(x)
        done = yield from self.inner.exchange(x, self.inner_state(state), step)
        residual = torch.zeros_like(done.mean) if done.residual is None else done.residual
        # What waits in the residual is not lost, so to the outside this exchange is lossless.
        return Exchanged(done.mean, None, {"residual": residual, **done.state})

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(inner=make("topk(density=0.1)")), cls(inner=make("int4")), cls(inner=make("powersgd(rank=2)"))]


@register("noef")
@dataclass(frozen=True, kw_only=True)
class NoFeedback(Wrapper):
    """Forget what was not sent: no residual memory, but biased compressors then lose part of the gradient for good."""

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        return (yield from self.inner.exchange(x, state, step))

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(inner=make("int4"))]


def with_feedback(compressor: Compressor) -> Compressor:
    """Add error feedback where the compressor asks for it and the user has not decided."""
    if isinstance(compressor, ErrorFeedback | NoFeedback):
        return compressor
    if isinstance(compressor, Wrapper):
        return replace(compressor, inner=with_feedback(compressor.inner))
    return ErrorFeedback(inner=compressor) if compressor.feedback else compressor
