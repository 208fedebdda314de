"""Gentle in critical phases, after Accordion (Agarwal et al., MLSys'21)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import Compressor, ConfigError, Layout, Role, State, Step, UnitSpec, make, register
from thinwire.wrappers import budgets
from thinwire.wrappers.density import check_fractions, with_density
from thinwire.wrappers.per_layer import PerLayerDensity

_UNKNOWN = -1.0
_SAME_EVERYWHERE = Layout(lambda tensor: 1, Role.REPLICATED)
_PER_RANK = Layout(lambda tensor: 1)
_LARGEST = 1e37  # sums over many ranks stay finite


@register("accordion")
@dataclass(frozen=True, kw_only=True)
class Accordion(PerLayerDensity):
    """A tensor whose gradient norm has changed by half since the window before is critical and gets the gentle density.

    Norms of the local gradients are added up over ``window`` steps and averaged over the ranks at its end: four bytes per
    tensor and window. All begin as critical. The paper looks at epochs and at the norm of the accumulated gradient; a
    window of steps and the mean norm are ours, because an exchange knows no epochs.

    Args:
        gentle: the density of critical tensors.
        strong: the density of all others.
        window: steps between two looks.
        change: how much of itself a norm must have changed by.
    """

    scheduled = ("gentle", "strong")

    gentle: float = 0.1
    strong: float = 0.01
    window: int = 100
    change: float = 0.5

    def __post_init__(self) -> None:
        check_fractions("accordion", gentle=self.gentle, strong=self.strong)
        if self.window < 1:
            raise ConfigError(f"accordion: window is {self.window}; expected a number of steps, at least 1")
        if not self.change > 0:
            raise ConfigError(f"accordion: change is {self.change}; expected a fraction above 0, for example 0.5")
        super().__post_init__()

    def own_layout(self) -> Mapping[str, Layout]:
        return {"norm_sum": _PER_RANK, "norm_before": _SAME_EVERYWHERE, "critical": _SAME_EVERYWHERE}

    def own_state(self, unit: UnitSpec) -> State:
        count, device = len(unit.tensors), unit.device
        return {
            "norm_sum": torch.zeros(count, dtype=torch.float64, device=device),
            "norm_before": torch.full((count,), _UNKNOWN, device=device),
            "critical": torch.ones(count, dtype=torch.bool, device=device),
        }

    def densities(self, state: State, unit: UnitSpec) -> list[float]:
        return [float(self.gentle if critical else self.strong) for critical in state["critical"].tolist()]

    def observe(self, x: Tensor, state: State, step: Step) -> tuple[Tensor | None, State]:
        _, squares = kernels.segment_moments(x, step.unit.offsets)
        own = {key: state[key] for key in self.own_layout()}
        own["norm_sum"] = state["norm_sum"] + squares.sqrt()
        if (step.index + 1) % self.window:
            return None, own
        return (own["norm_sum"] / self.window).clamp_max(_LARGEST).float(), own

    def decide(self, agreed: Tensor, state: State, step: Step) -> State:
        before, now = state["norm_before"].tolist(), agreed.tolist()
        critical = [
            old == _UNKNOWN or budgets.is_critical(old, new, self.change) for old, new in zip(before, now, strict=True)
        ]
        return {
            "norm_sum": torch.zeros_like(state["norm_sum"]),
            "norm_before": agreed,
            "critical": torch.tensor(critical, dtype=torch.bool, device=agreed.device),
        }

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        """With nothing critical: the least that is sent."""
        measured = 2 * (world_size - 1) * 4 * len(unit.tensors) // (world_size * self.window)
        return measured + with_density(self.inner, float(self.strong)).wire_bytes(unit, world_size)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(gentle=0.25, strong=0.05, window=1, inner=make("topk"))]
