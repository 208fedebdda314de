"""Fusion groups that follow what was measured.

The first steps run with groups of a fixed size and are profiled. Then rank 0 plans and all ranks take over its plan at the
same step; later it looks again at fixed intervals and plans anew when the measurements have drifted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from thinwire.compressors.dense import Dense
from thinwire.core import CheckpointError, Compressor, ConfigError, Schedule, TensorSpec, Wrapper
from thinwire.engine.agreeing import agreed
from thinwire.engine.groups import Group, make_group
from thinwire.engine.offloading import choose_hosted
from thinwire.engine.profiling import WINDOW_STEPS, StepProfiler
from thinwire.engine.session import Session
from thinwire.fusion import FusionPlanner, Profile, ssfusion
from thinwire.fusion.prepare import wire_share

log = logging.getLogger(__name__)

WARMUP_STEPS = 3  # connections, caches, allocations
CHECK_EVERY_STEPS = 100
DRIFT = 0.15


@dataclass(frozen=True)
class GroupPlan:
    """One planned group, by parameter names; what ranks agree on and checkpoints keep.

    Args:
        dense: members that are sent whole although the compressor would sparsify them.
        density: of the other members; None leaves the compressor as it is.
        hosted: members whose compressor runs on the host.
    """

    names: tuple[str, ...]
    dense: tuple[str, ...] = ()
    density: float | None = None
    hosted: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        lists = {"names": self.names, "dense": self.dense, "hosted": self.hosted}
        return {**{key: list(names) for key, names in lists.items()}, "density": self.density}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> GroupPlan:
        # Plans of checkpoints from before host offload have no such entry.
        names, dense, hosted = (tuple(values.get(key, ())) for key in ("names", "dense", "hosted"))
        return cls(names, dense, values["density"], hosted)


class Regrouping:
    """Decides, after each step, whether the groups change.

    Args:
        tensors: all tensors of the model, in the order in which their gradients are expected at first.
    """

    quiet = False  # groups leave as soon as they are complete

    def __init__(self, planner: FusionPlanner, tensors: Sequence[TensorSpec], session: Session) -> None:
        self._session = session
        self._tensors = {tensor.fqn: tensor for tensor in tensors}
        self.use(planner)

    def use(self, planner: FusionPlanner, order: Sequence[str] = ()) -> None:
        """Begin anew, with the session's compressor.

        Args:
            order: all names, in the order in which their gradients are ready; default: as at first.

        Raises:
            ConfigError: this fusion needs another compressor.
        """
        tensors, compressor = [self._tensors[name] for name in order or self._tensors], self._session.compressor
        if planner.splits and density_of(compressor) is None:
            raise ConfigError(
                f"fuse={planner.name!r} weighs dense against sparse; {compressor} has no density. Use 'safusion'"
            )
        if planner.splits and isinstance(density_of(compressor), Schedule):
            raise ConfigError(
                f"fuse={planner.name!r} sets densities itself; {compressor} has one that changes. Use 'safusion'"
            )
        self._planner, self._compressor = planner, compressor
        self._small = _small_tensors(tensors, compressor)
        fused = [tensor for tensor in tensors if tensor.fqn not in self._small]
        self._profiler = StepProfiler(fused, density_of(compressor) or 1.0)
        self._profile: Profile | None = None
        self._steps = 0
        share = wire_share(fused, compressor, self._session.transport.world_size)
        self.plan = self._with_small([GroupPlan(_names(group)) for group in planner(fused, share)])

    def groups(self) -> list[Group]:
        """The groups of the current plan."""
        return [group for plan in self.plan for group in self._make(plan)]

    def read(self, plan: list[dict[str, Any]]) -> list[GroupPlan]:
        """A plan from a checkpoint.

        Raises:
            CheckpointError: it is of another model.
        """
        plans = [GroupPlan.from_json(values) for values in plan]
        if sorted(name for one in plans for name in one.names) != sorted(self._tensors):
            raise CheckpointError("the fusion plan in the checkpoint names other parameters than this model has")
        return plans

    def adopt(self, plan: list[GroupPlan]) -> None:
        """Take over a plan; it stays until a later check finds that the measurements have drifted."""
        self.plan = plan
        self._steps = max(self._steps, WARMUP_STEPS + WINDOW_STEPS)

    def after_step(self, groups: Sequence[Group]) -> list[Group] | None:
        """Take in the step that has just ended; the new groups if all ranks change to others now."""
        if not self._planner.needs_profile:
            return None
        self._steps += 1
        trace = self._session.meter.last_trace
        if trace is not None and self._steps > WARMUP_STEPS:
            meter, elems = self._session.meter, [_elems(group) for group in groups]
            # An accelerator computes by itself: that its thread has little to do does not mean it lacks a core.
            core_share = meter.backward_core_share if self._session.device.type == "cpu" else 1.0
            self._profiler.add(meter.last_ready_s, trace, elems, core_share)
        if not self._is_time():
            return None
        mine = self._propose() if self._session.rank == 0 else None
        plan = agreed(self._session, mine and [group.to_json() for group in mine])
        if plan is None:
            return None
        self.plan = [GroupPlan.from_json(group) for group in plan]
        log.info("fusion: %d groups from step %d on", len(plan), self._session.step)
        return self.groups()

    def _is_time(self) -> bool:
        """A function of the step count alone, so that all ranks ask at the same time."""
        return self._steps == WARMUP_STEPS + WINDOW_STEPS or self._steps % CHECK_EVERY_STEPS == 0

    def _propose(self) -> list[GroupPlan] | None:
        profile = self._profiler.profile()
        in_use = [tuple(self._tensors[name] for name in group.names) for group in self.plan]
        if self._profile is not None and self._profile.relative_drift(profile, in_use) <= DRIFT:
            return None
        self._profile = profile
        if self._planner.splits:
            return self._with_small(self._split(profile))
        return self._with_small([GroupPlan(_names(group)) for group in self._planner.plan(profile)])

    def _split(self, profile: Profile) -> list[GroupPlan]:
        """SSFusion: part of each group stays dense, and the host may select some of the rest."""
        split = ssfusion(profile)
        hosted = choose_hosted(profile, split, self._compressor) if self._planner.offloads else [()] * len(split)
        return [
            GroupPlan(_names(s.tensors), _names(s.dense), s.density if s.sparse else None, _names(on_host))
            for s, on_host in zip(split, hosted, strict=True)
        ]

    def _with_small(self, plan: list[GroupPlan]) -> list[GroupPlan]:
        """What stays dense because it is small travels with the last group: one message a step, not one a group."""
        if not self._small or not plan:
            return plan
        return [*plan[:-1], replace(plan[-1], names=(*plan[-1].names, *self._small))]

    def _make(self, plan: GroupPlan) -> list[Group]:
        """One group, or two where part of it stays dense: that part travels while the other is still being selected."""
        compressor = self._compressor if plan.density is None else with_density(self._compressor, plan.density)
        whole = [self._tensors[name] for name in plan.names if name in plan.dense]
        rest = [self._tensors[name] for name in plan.names if name not in plan.dense]
        parts = [part for part in (whole, rest) if part]
        return [make_group(part, compressor, whole=plan.dense, hosted=plan.hosted) for part in parts]


def _small_tensors(tensors: Sequence[TensorSpec], compressor: Compressor) -> tuple[str, ...]:
    """Tensors that routing leaves dense, unless everything is dense."""
    dense = tuple(tensor.fqn for tensor in tensors if isinstance(compressor.route(tensor), Dense))
    return dense if len(dense) < len(tensors) else ()


def density_of(compressor: Compressor) -> float | None:
    """The density of a sparsifier, also inside wrappers."""
    if isinstance(compressor, Wrapper):
        return density_of(compressor.inner)
    return getattr(compressor, "density", None)


def with_density(compressor: Compressor, density: float) -> Compressor:
    """The same compressor at another density."""
    if isinstance(compressor, Wrapper):
        return replace(compressor, inner=with_density(compressor.inner, density))
    assert any(f.name == "density" for f in fields(compressor))  # type: ignore[arg-type]
    return replace(compressor, density=density)  # type: ignore[type-var]


def _names(tensors: Sequence[TensorSpec]) -> tuple[str, ...]:
    return tuple(tensor.fqn for tensor in tensors)


def _elems(group: Group) -> int:
    return sum(unit.spec.numel for unit in group.units)
