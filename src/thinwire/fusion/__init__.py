"""Which tensors travel together: pure functions from tensors in ready order, or a measured profile, to fusion groups."""

from thinwire.fusion.costs import GroupCosts
from thinwire.fusion.curve import Curve
from thinwire.fusion.earned import merge_costly
from thinwire.fusion.fixed import fixed_groups, unfused_groups
from thinwire.fusion.groups import (
    Group,
    GroupPlan,
    Groups,
    Unit,
    groups_of_counts,
    make_groups,
    plan_groups,
)
from thinwire.fusion.measured import measured_plans
from thinwire.fusion.offload import offload
from thinwire.fusion.optimal import optimal_groups
from thinwire.fusion.parse import FusionPlanner, parse_fusion
from thinwire.fusion.profile import ModelProfile, Noise, TensorProfile
from thinwire.fusion.safusion import safusion_groups
from thinwire.fusion.ssfusion import ssfusion, ssfusion_groups
from thinwire.fusion.tapered import tapered_groups

__all__ = [
    "Curve",
    "FusionPlanner",
    "Group",
    "GroupCosts",
    "GroupPlan",
    "Groups",
    "ModelProfile",
    "Noise",
    "TensorProfile",
    "Unit",
    "fixed_groups",
    "groups_of_counts",
    "make_groups",
    "measured_plans",
    "merge_costly",
    "offload",
    "optimal_groups",
    "parse_fusion",
    "plan_groups",
    "safusion_groups",
    "ssfusion",
    "ssfusion_groups",
    "tapered_groups",
    "unfused_groups",
]
