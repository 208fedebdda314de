"""From a measured step to the plan of any fusion that needs one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from thinwire.core import ConfigError
from thinwire.fusion.costs import GroupCosts
from thinwire.fusion.curve import Curve
from thinwire.fusion.earned import merge_costly
from thinwire.fusion.groups import GroupPlan, Groups, names_of
from thinwire.fusion.offload import offload
from thinwire.fusion.parse import FusionPlanner
from thinwire.fusion.profile import ModelProfile
from thinwire.fusion.ssfusion import ssfusion


def measured_plans(
    planner: FusionPlanner,
    profile: ModelProfile,
    costs: GroupCosts,
    *,
    host: Curve | None = None,
    finish_s: Callable[[list[GroupPlan]], float] | None = None,
) -> list[GroupPlan]:
    """The groups, without the small tensors that travel with the last one.

    Args:
        profile: of the tensors that are fused.
        host: seconds to select from a tensor of so many elements on the host; for host offload only.
        finish_s: when the step with some groups ends, where messages take processor time from backward; None: they do not.

    Raises:
        ConfigError: host offload without a curve of the host.
    """
    if planner.splits:
        plans = ssfusion(profile, costs)
        return _offloaded(profile, costs, plans, host) if planner.offloads else plans
    groups = planner.plan(profile, costs)
    if finish_s is None:
        return _plans(groups)
    ends_s = finish_s
    return _plans(merge_costly(groups, lambda merged: ends_s(_plans(merged))))


def _plans(groups: Groups) -> list[GroupPlan]:
    return [GroupPlan(names_of(group)) for group in groups]


def _offloaded(
    profile: ModelProfile, costs: GroupCosts, plans: Sequence[GroupPlan], host: Curve | None
) -> list[GroupPlan]:
    """With the tensors that the host selects; the dense ones are not selected at all."""
    if host is None:
        raise ConfigError("host offload needs the host's curve: give Pricer(host=host_curve(tensors, compressor))")
    tensors = {tensor.fqn: tensor for tensor in profile.specs}
    sparse = [tuple(tensors[name] for name in plan.names if name not in plan.dense) for plan in plans]
    hosted = offload(profile, costs.encode, sparse, host)
    return [replace(plan, hosted=names_of(chosen)) for plan, chosen in zip(plans, hosted, strict=True)]
