"""From tensors to fusion groups, by one set of rules: the runtime builds its groups here, and the planner prices them.

A plan names the parameters of each group (``GroupPlan``): ranks agree on it, and checkpoints keep it. ``make_groups`` turns
it into units: routing gives each tensor its compressor, and tensors that share one travel as one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

from thinwire.compressors.dense import Dense
from thinwire.core import CheckpointError, Compressor, ConfigError, TensorSpec, UnitSpec, Wrapper
from thinwire.core.schema import from_json
from thinwire.fusion.prepare import units_of, wire_share

Groups = list[tuple[TensorSpec, ...]]


@dataclass(frozen=True, eq=False)
class Unit:
    """Tensors with the compressor they share."""

    spec: UnitSpec
    compressor: Compressor


@dataclass(frozen=True, eq=False)
class Group:
    """Units whose requests are merged into one message per kind and round."""

    units: tuple[Unit, ...]

    @property
    def tensors(self) -> list[TensorSpec]:
        """In the order of the units."""
        return [tensor for unit in self.units for tensor in unit.spec.tensors]


@dataclass(frozen=True)
class GroupPlan:
    """One planned group, by parameter names.

    Args:
        dense: members that are sent whole although the compressor would sparsify them.
        density: of the other members; None leaves the compressor as it is.
        hosted: members whose compressor runs on the host.
    """

    names: tuple[str, ...]
    dense: tuple[str, ...] = ()
    density: float | None = None
    hosted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Written so that NaN fails too.
        if self.density is not None and not 0 < self.density <= 1:
            raise ConfigError(f"density is {self.density}; expected one in (0, 1], or none")
        for key, part in (("dense", self.dense), ("hosted", self.hosted)):
            if not set(part) <= set(self.names):
                raise ConfigError(f"{key} names {part}; expected some of the group's own {self.names}")


@dataclass(frozen=True)
class _Fusion:
    fusion: tuple[GroupPlan, ...]


def read_plans(values: Any, tensors: Iterable[str]) -> list[GroupPlan]:
    """The plan of a checkpoint, for a model with these parameters.

    Raises:
        CheckpointError: it is of another model, or no plan.
    """
    remedy = "load what state_dict() has given, unchanged"
    plans = list(
        from_json(_Fusion, {"fusion": values}, what="fusion plan", remedy=remedy, error=CheckpointError).fusion
    )
    if sorted(name for one in plans for name in one.names) != sorted(tensors):
        raise CheckpointError("the fusion plan in the checkpoint names other parameters than this model has")
    return plans


def make_groups(plans: Sequence[GroupPlan], tensors: Mapping[str, TensorSpec], compressor: Compressor) -> list[Group]:
    """The groups in the order in which they leave.

    A planned group becomes two where part of it stays dense: that part travels while the other is still being selected.

    Args:
        tensors: by name.
    """
    groups: list[Group] = []
    for plan in plans:
        chosen = compressor if plan.density is None else with_density(compressor, plan.density)
        dense = [tensors[name] for name in plan.names if name in plan.dense]
        rest = [tensors[name] for name in plan.names if name not in plan.dense]
        groups += [make_group(part, chosen, dense=plan.dense, hosted=plan.hosted) for part in (dense, rest) if part]
    return groups


def make_group(
    tensors: Sequence[TensorSpec], compressor: Compressor, *, dense: Sequence[str] = (), hosted: Sequence[str] = ()
) -> Group:
    """One unit per compressor, in order of first use; the arguments are those of ``GroupPlan``."""
    units = units_of(tensors, compressor, dense=dense, hosted=hosted)
    return Group(tuple(Unit(UnitSpec(members), chosen) for chosen, members in units.items()))


def plan_groups(
    planner: Callable[[Sequence[TensorSpec], float], Groups],
    tensors: Sequence[TensorSpec],
    compressor: Compressor,
    world_size: int,
) -> list[GroupPlan]:
    """Groups that need no measurement.

    Args:
        planner: called with tensors and the share of their bytes that is sent; a ``FusionPlanner``, for example.
        tensors: in the order in which their gradients are ready.
    """
    small = small_tensors(tensors, compressor)
    fused = [tensor for tensor in tensors if tensor.fqn not in small]
    groups = planner(fused, wire_share(fused, compressor, world_size))
    return with_small([GroupPlan(names_of(group)) for group in groups], small)


def small_tensors(tensors: Sequence[TensorSpec], compressor: Compressor) -> tuple[str, ...]:
    """Names of the tensors that routing leaves dense; none where it leaves all of them dense."""
    dense = tuple(tensor.fqn for tensor in tensors if isinstance(compressor.route(tensor), Dense))
    return dense if len(dense) < len(tensors) else ()


def with_small(plans: Sequence[GroupPlan], small: Sequence[str]) -> list[GroupPlan]:
    """Small tensors travel with the last group: one dense message a step, not one a group."""
    if not plans:
        return []
    return [*plans[:-1], replace(plans[-1], names=(*plans[-1].names, *small))]


def density_of(compressor: Compressor) -> float | None:
    """The density of a sparsifier, also inside wrappers; None for everything else."""
    if isinstance(compressor, Wrapper):
        return density_of(compressor.inner)
    return getattr(compressor, "density", None)


def with_density(compressor: Compressor, density: float) -> Compressor:
    """The same compressor at another density."""
    if isinstance(compressor, Wrapper):
        return replace(compressor, inner=with_density(compressor.inner, density))
    assert any(f.name == "density" for f in fields(compressor))  # type: ignore[arg-type]
    return replace(compressor, density=density)  # type: ignore[type-var]


def names_of(tensors: Iterable[TensorSpec]) -> tuple[str, ...]:
    """Their parameter names."""
    return tuple(tensor.fqn for tensor in tensors)


def groups_of_counts(tensors: Sequence[TensorSpec], counts: Sequence[int]) -> Groups:
    """Consecutive tensors in groups of the given sizes: the same tensors on every rank, whatever their bytes.

    Raises:
        ConfigError: the counts do not add up to the tensors, or a group is empty.
    """
    if sum(counts) != len(tensors) or any(count < 1 for count in counts):
        raise ConfigError(
            f"the fusion plan has groups of {list(counts)} tensors, {sum(counts)} in total; expected groups of at least "
            f"one and {len(tensors)} in total. The plan belongs to another model: make a new one"
        )
    ends = accumulate(counts, initial=0)
    return [tuple(tensors[start:end]) for start, end in pairwise(ends)]
