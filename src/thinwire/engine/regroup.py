"""Fusion groups that follow what was measured.

The first steps run with groups of a fixed size and are profiled. Then rank 0 plans and all ranks take over its plan at the
same step; later it looks again at fixed intervals and plans anew when the measurements have drifted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from thinwire.core import TensorSpec
from thinwire.engine.agreeing import agreed
from thinwire.engine.profiling import WINDOW_STEPS, Measured, StepProfiler
from thinwire.engine.session import Session
from thinwire.fusion import FusionPlanner, merge_costly, offload, ssfusion
from thinwire.fusion.groups import (
    Group,
    GroupPlan,
    density_of,
    make_groups,
    names_of,
    plan_groups,
    read_plans,
    small_tensors,
    with_small,
)
from thinwire.plan import host_curve

log = logging.getLogger(__name__)

WARMUP_STEPS = 3  # connections, caches, allocations
CHECK_EVERY_STEPS = 100
DRIFT = 0.15


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
        planner.check(compressor)
        self._planner, self._compressor = planner, compressor
        self._small = small_tensors(tensors, compressor)
        fused = [tensor for tensor in tensors if tensor.fqn not in self._small]
        self._profiler = StepProfiler(fused, density_of(compressor) or 1.0)
        self._profile: Measured | None = None
        self._steps = 0
        self.plan = plan_groups(planner, tensors, compressor, self._session.transport.world_size)

    def groups(self) -> list[Group]:
        """The groups of the current plan."""
        return make_groups(self.plan, self._tensors, self._compressor)

    def read(self, plan: list[dict[str, Any]]) -> list[GroupPlan]:
        """A plan from a checkpoint.

        Raises:
            CheckpointError: it is of another model.
        """
        return read_plans(plan, self._tensors)

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
        found = self._profiler.profile()
        in_use = [tuple(self._tensors[name] for name in group.names) for group in self.plan]
        if self._profile is not None and self._profile.relative_drift(found, in_use) <= DRIFT:
            return None
        self._profile = found
        if self._planner.splits:
            return with_small(self._split(found), self._small)
        groups = self._planner.plan(found.profile, found.costs)
        merged = merge_costly(groups, found.finish_s) if found.message_cost_s > 0 else groups
        return with_small([GroupPlan(names_of(group)) for group in merged], self._small)

    def _split(self, found: Measured) -> list[GroupPlan]:
        """SSFusion: part of each group stays dense, and the host may select some of the rest."""
        plans = ssfusion(found.profile, found.costs)
        if not self._planner.offloads:
            return plans
        sparse = [tuple(self._tensors[n] for n in plan.names if n not in plan.dense) for plan in plans]
        host = host_curve([tensor for group in sparse for tensor in group], self._compressor)
        hosted = offload(found.profile, found.costs.encode, sparse, host)
        return [replace(plan, hosted=names_of(on_host)) for plan, on_host in zip(plans, hosted, strict=True)]


def _elems(group: Group) -> int:
    return sum(unit.spec.numel for unit in group.units)
