"""Agreed wire scales: the state that the compressors with ``scale="agreed"`` keep, and how it is brought up to date.

Per tensor, ``amax`` is the largest magnitude over the ranks when last measured (every ``refresh`` steps) and ``saturated``
counts how often a gradient had outgrown it. The rank that is affected notices it, told to all with the data, and
answered in the same step: amax is measured again and the data are sent again, so nothing is ever cut.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import AllReduce, ConfigError, Layout, Request, Role, State, Step, UnitSpec
from thinwire.formats import wire_scale

ONE_PER_TENSOR = Layout(lambda tensor: 1, Role.REPLICATED)
SCALE_POLICIES = ("block", "agreed")


def check_policy(name: str, scale: str, refresh: int) -> None:
    """Raise ConfigError unless both fields make sense."""
    if scale not in SCALE_POLICIES:
        raise ConfigError(f"{name}: scale is {scale!r}; expected 'block' or 'agreed'")
    if refresh < 1:
        raise ConfigError(f"{name}: refresh is {refresh}; expected a number of steps, at least 1")


def initial_state(unit: UnitSpec) -> State:
    """Nothing measured, nothing counted."""
    device = unit.tensors[0].device if unit.tensors else torch.device("cpu")
    count = len(unit.tensors)
    return {
        "amax": torch.full((count,), wire_scale.UNKNOWN, device=device),
        "saturated": torch.zeros(count, dtype=torch.int64, device=device),
    }


def state_layout() -> Mapping[str, Layout]:
    """Both are the same on all ranks."""
    return {"amax": ONE_PER_TENSOR, "saturated": ONE_PER_TENSOR}


@dataclass(frozen=True)
class TensorScales:
    """The scales of the tensors of a unit in one step.

    Args:
        amax: largest magnitudes over the ranks, when last measured.
        local_amax: largest magnitudes on this rank now.
        largest: the largest value of the format.
        terms: how many values are added in the format.
    """

    unit: UnitSpec
    amax: Tensor
    local_amax: Tensor
    largest: float
    terms: int

    @property
    def exponents(self) -> Tensor:
        return wire_scale.scale_exponents(self.amax, self.largest, self.terms)

    @property
    def outgrown(self) -> Tensor:
        """Per tensor, whether this rank's values no longer fit."""
        # The margin makes a fresh amax fit; what is not finite never does, and is not worth measuring again.
        too_large = wire_scale.saturates(self.local_amax, self.exponents, self.largest, self.terms)
        return too_large & torch.isfinite(self.local_amax)

    def scaled(self, x: Tensor, *, inverse: bool = False, weight: float = 1.0) -> Tensor:
        """``x`` (the unit, maybe padded) times its scales, or divided by them, as a new tensor."""
        exponents = -self.exponents if inverse else self.exponents
        factors = torch.ldexp(torch.full_like(self.amax, weight), exponents).tolist()
        parts = x[: self.unit.numel].split(self.unit.sizes)
        padding = x.new_zeros(x.numel() - self.unit.numel)
        return torch.cat([*(part * factor for part, factor in zip(parts, factors, strict=True)), padding])


def measure(x: Tensor, step: Step) -> Tensor:
    """The largest magnitude of every tensor on this rank."""
    return kernels.segment_amax(x, step.unit.offsets)


def due(state: State, step: Step, refresh: int) -> bool:
    """Whether all ranks measure again: a function of the step and of replicated state only."""
    return step.index % refresh == 0 or bool((state["amax"] < 0).any())


def agree(local_amax: Tensor) -> Generator[Request, Any, Tensor]:
    """The largest magnitudes over the ranks."""
    agreed: Tensor = yield AllReduce(local_amax.clone(), "max")
    return agreed


def counted(state: State, amax: Tensor, outgrown: Tensor) -> State:
    """The state after a step."""
    return {"amax": amax, "saturated": state["saturated"] + outgrown}
