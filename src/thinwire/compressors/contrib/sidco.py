"""SIDCo: Abdelmoniem et al., An Efficient Statistical-based Gradient Compression Technique (MLSys'21)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compressors.contrib.estimated import ThresholdEstimator
from thinwire.compressors.shared.magnitudes import Magnitudes, magnitudes
from thinwire.core import Compressor, ConfigError, Exchange, Exchanged, Layout, State, Step, UnitSpec, register

LAWS = ("exponential", "gamma", "pareto")
FIRST_DENSITY = 0.25
_PERIOD = 5
_FEWEST, _MOST = 0.8, 1.2
_FLAT = 1e-6  # shapes closer to the exponential law than this are taken for it: the formulas divide by the difference
_PER_TENSOR = Layout(lambda tensor: 1)
_INITIAL = {"stages": 1.0, "sign": 1.0, "last": 0.0, "total": 0.0, "calls": 0.0}


@register("sidco")
@dataclass(frozen=True, kw_only=True)
class SIDCo(ThresholdEstimator):
    """Send what exceeds a threshold computed from a law fitted to the magnitudes, then to their tail, in stages.

    The first of m > 1 stages aims at 1/4 of the entries, each later one at an equal share of what remains, fitted to the
    excess over the threshold so far (peaks over threshold). Laws: exponential, threshold = mean·ln(1/d); gamma in the first
    stage and generalised Pareto later; generalised Pareto throughout (moments). Every 5 calls m moves by one where the mean
    of sent/wanted left 0.8..1.2: up when too few are sent, and the other way round once that made it worse. Fits, bounds and
    the moving rule are as in public code of the method (a copy in another project), which keeps one m for the whole model and
    measures the excess from the smallest exceedance; here every tensor has its m, and the excess counts from the threshold
    itself.

    Args:
        law: ``exponential``, ``gamma`` or ``pareto``.
    """

    law: str = "exponential"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.law not in LAWS:
            raise ConfigError(f"sidco: law is {self.law!r}; expected one of {', '.join(LAWS)}")

    def init(self, unit: UnitSpec) -> State:
        device = unit.tensors[0].device if unit.tensors else torch.device("cpu")
        return {key: torch.full((len(unit.tensors),), value, device=device) for key, value in _INITIAL.items()}

    def layout(self) -> Mapping[str, Layout]:
        return dict.fromkeys(_INITIAL, _PER_TENSOR)

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        now = self.at(step.index)
        chosen = now.exceeding(x, now.staged(x, step.unit, state["stages"]), step.unit)
        sent = torch.tensor(chosen.counts, device=x.device) / now.wanted(step.unit).to(x.device).clamp(min=1)
        mean, residual = yield from now.average(chosen, step)
        return Exchanged(mean, residual, now._adapted(state, sent.float()))

    def thresholds(self, x: Tensor, unit: UnitSpec) -> Tensor:
        return self.staged(x, unit, self.init(unit)["stages"])

    def staged(self, x: Tensor, unit: UnitSpec, stages: Tensor) -> Tensor:
        """Thresholds after as many fits per tensor as ``stages`` says."""
        stages = torch.where(torch.tensor(self.density >= FIRST_DENSITY, device=x.device), 1, stages).double()
        later = (self.density / FIRST_DENSITY) ** (1 / (stages - 1).clamp(min=1))
        first = torch.where(stages > 1, FIRST_DENSITY, self.density)
        limits = torch.zeros_like(stages)
        candidates = magnitudes(x, unit.offsets)
        for stage in range(int(stages.max()) if stages.numel() else 0):
            share = first if stage == 0 else later
            raised = limits + self._quantile(candidates, limits, share, first_stage=stage == 0)
            limits = torch.where(stage < stages, raised, limits)
            candidates = candidates.above(limits)
        return limits

    def _quantile(self, tail: Magnitudes, limits: Tensor, share: Tensor, *, first_stage: bool) -> Tensor:
        """The excess over ``limits`` that the fraction ``share`` of the tail exceeds, by the fitted law."""
        mean, variance = tail.mean_and_variance()
        mean = torch.where(tail.counts > 0, mean - limits, 0.0)  # of the excess; the variance is that of the values
        if self.law == "exponential":
            return _exponential(mean, share)
        if self.law == "gamma" and first_stage:
            return _gamma(tail, mean, share)
        return _pareto(mean, variance, share)

    def _adapted(self, state: State, sent: Tensor) -> State:
        """Stage counts for the next call; ``sent`` is what was sent over what was wanted."""
        total, calls = state["total"] + sent, state["calls"] + 1
        due, found = calls >= _PERIOD, total / calls
        worse = (state["last"] > 0) & ((found - 1).abs() > (state["last"] - 1).abs())
        sign = torch.where(due & worse, -state["sign"], state["sign"])
        move = (found < _FEWEST).float() - (found > _MOST).float()
        most = math.ceil(math.log(self.density) / math.log(0.5))
        stages = torch.where(due, state["stages"] + sign * move, state["stages"]).clamp(1, max(most, 1))
        return {
            "stages": stages,
            "sign": sign,
            "last": torch.where(due, found, state["last"]),
            "total": torch.where(due, 0.0, total),
            "calls": torch.where(due, 0.0, calls),
        }

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(density=0.01), cls(density=0.1, law="gamma")]


def _exponential(mean: Tensor, share: Tensor) -> Tensor:
    return -mean * share.log()


def _pareto(mean: Tensor, variance: Tensor, share: Tensor) -> Tensor:
    """Generalised Pareto law with this mean and variance; it becomes the exponential one where they are equal squares."""
    squared = mean.square() / variance.clamp(min=torch.finfo(torch.float64).tiny)
    scale, shape = mean * (squared + 1) / 2, (squared - 1) / 2
    usable = (variance > 0) & (shape.abs() > _FLAT) & torch.isfinite(scale)
    safe_shape = torch.where(usable, shape, 1.0)
    tail = scale * (1 - (safe_shape * share.log()).exp()) / safe_shape
    return torch.where(usable, tail, _exponential(mean, share))


def _gamma(tail: Magnitudes, mean: Tensor, share: Tensor) -> Tensor:
    """Gamma law fitted by mean and mean logarithm, with the approximation of its quantile that the paper gives."""
    logs = Magnitudes(tail.values.clamp(min=torch.finfo(torch.float32).tiny).log(), tail.offsets)
    spread = (mean.clamp(min=torch.finfo(torch.float64).tiny).log() - logs.mean_and_variance()[0]).clamp(min=_FLAT)
    shape = (3 - spread + ((spread - 3).square() + 24 * spread).sqrt()) / (12 * spread)
    return (-(mean / shape) * (share.log() + shape.lgamma())).clamp(min=0)
