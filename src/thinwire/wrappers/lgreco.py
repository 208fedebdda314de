"""Densities per layer by dynamic programming, after L-GreCo (Alimohammadi et al., MLSys'24)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core import Compressor, ConfigError, Layout, Role, State, Step, UnitSpec, make, register, residual_key
from thinwire.wrappers import budgets
from thinwire.wrappers.density import check_fractions, with_density
from thinwire.wrappers.per_layer import PerLayerDensity

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_UNIFORM = _FACTORS.index(1.0)
_LEVEL = Layout(lambda tensor: 1, Role.REPLICATED)


@register("lgreco")
@dataclass(frozen=True, kw_only=True)
class LGreCo(PerLayerDensity):
    """Every tensor gets 1/4, 1/2, 1, 2 or 4 times the reference density, chosen from the errors that were measured.

    Every ``refresh`` steps each rank finds how much of ‖g + e‖² the largest entries of every tensor leave behind at the
    five densities; the shares are averaged over the ranks. ``dp``: the fewest bytes whose errors add up to no more than
    those of the reference everywhere (to within 0.5 %), as in the paper. ``greedy``: the least error for no more bytes
    than the reference. Either is used only if it wins by more than 5 %; otherwise all tensors keep the reference.

    Deviates: the error is that of an exact top-k whatever sparsifier is wrapped, and the choice is among the tensors that
    travel together, so that it depends on the grouping.

    Args:
        reference: the density that all tensors would have.
        search: ``dp`` saves bytes at equal error, ``greedy`` error at equal bytes.
        refresh: steps between measurements.
    """

    scheduled = ("reference",)

    reference: float = 0.01
    search: str = "dp"
    refresh: int = 100

    def __post_init__(self) -> None:
        check_fractions("lgreco", reference=self.reference)
        if self.search not in ("dp", "greedy"):
            raise ConfigError(f"lgreco: search is {self.search!r}; expected 'dp' or 'greedy'")
        if self.refresh < 1:
            raise ConfigError(f"lgreco: refresh is {self.refresh}; expected a number of steps, at least 1")
        super().__post_init__()

    def own_layout(self) -> Mapping[str, Layout]:
        return {"density_level": _LEVEL}

    def own_state(self, unit: UnitSpec) -> State:
        return {"density_level": torch.full((len(unit.tensors),), _UNIFORM, device=unit.device)}

    @property
    def _candidates(self) -> list[float]:
        return [min(1.0, self.reference * factor) for factor in _FACTORS]

    def densities(self, state: State, unit: UnitSpec) -> list[float]:
        return [self._candidates[level] for level in state["density_level"].tolist()]

    def observe(self, x: Tensor, state: State, step: Step) -> tuple[Tensor | None, State]:
        own = {"density_level": state["density_level"]}
        if step.index % self.refresh or not x.numel():
            return None, own
        key = residual_key(self.inner.layout())
        compensated = x if key is None else x + state[key]
        left = torch.stack([self._left_behind(part) for part in compensated.split(step.unit.sizes)])
        # Of all that there is to send on this rank: stays in the range of fp32, and all ranks count alike.
        everything = compensated.double().square().sum().clamp_min(1e-300)
        return (left / everything).float(), own

    def _left_behind(self, part: Tensor) -> Tensor:
        """The squares that remain when only the largest entries go, for each candidate; fp64."""
        counts = [_kept(density, part.numel()) for density in self._candidates]
        largest = part.abs().topk(max(counts)).values.double().square()
        sums = torch.cat([largest.new_zeros(1), largest.cumsum(0)])
        return (part.double().square().sum() - sums[counts]).clamp_min(0)

    def decide(self, agreed: Tensor, state: State, step: Step) -> State:
        errors = agreed.double().tolist()
        costs = [self._costs(UnitSpec((tensor,))) for tensor in step.unit.tensors]
        levels = self._search(costs, errors)
        return {"density_level": torch.tensor(levels, device=state["density_level"].device)}

    def _costs(self, unit: UnitSpec) -> list[float]:
        """Bytes between two ranks: what counts is how they compare."""
        return [with_density(self.inner, density).wire_bytes(unit, 2) for density in self._candidates]

    def _search(self, costs: budgets.Table, errors: budgets.Table) -> list[int]:
        uniform = [_UNIFORM] * len(costs)
        if self.search == "dp":
            # Half a step of error per layer: together no more than 0.5 % of the bound.
            chosen = budgets.cheapest(costs, errors, budgets.total(errors, uniform), max(4096, 100 * len(costs)))
            least = costs
        else:
            chosen, least = budgets.greedy(costs, errors, budgets.total(costs, uniform)), errors
        if chosen is None:
            return uniform
        wins = budgets.worthwhile(budgets.total(least, chosen), budgets.total(least, uniform))
        return chosen if wins else uniform

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        """At the reference: ``dp`` sends less, ``greedy`` about as much."""
        measured = 2 * (world_size - 1) * 4 * len(_FACTORS) * len(unit.tensors) // (world_size * self.refresh)
        return measured + with_density(self.inner, float(self.reference)).wire_bytes(unit, world_size)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        inner = make("topk")
        return [
            cls(reference=0.05, refresh=2, inner=inner),
            cls(reference=0.1, search="greedy", refresh=1, inner=inner),
        ]


def _kept(density: float, numel: int) -> int:
    """As sparsifiers count: at least one, nothing of an empty tensor."""
    return min(numel, max(1, int(density * numel)))
