"""Which tensors travel together: pure functions from tensors in ready order, or a measured profile, to fusion groups."""

from thinwire.fusion.curve import Curve
from thinwire.fusion.drawing import draw
from thinwire.fusion.earned import merge_costly
from thinwire.fusion.fixed import fixed_groups, unfused_groups
from thinwire.fusion.groups import Groups, groups_of_counts, tensor_counts
from thinwire.fusion.offload import offload
from thinwire.fusion.optimal import optimal_groups
from thinwire.fusion.parse import FusionPlanner, parse_fusion
from thinwire.fusion.profile import Profile, TensorProfile
from thinwire.fusion.safusion import safusion_groups
from thinwire.fusion.ssfusion import SplitGroup, ssfusion, ssfusion_groups
from thinwire.fusion.tapered import tapered_groups
from thinwire.fusion.timeline import Sent, Timeline, simulate_split_step, simulate_step

__all__ = [
    "Curve",
    "FusionPlanner",
    "Groups",
    "Profile",
    "Sent",
    "SplitGroup",
    "TensorProfile",
    "Timeline",
    "draw",
    "fixed_groups",
    "groups_of_counts",
    "merge_costly",
    "offload",
    "optimal_groups",
    "parse_fusion",
    "safusion_groups",
    "simulate_split_step",
    "simulate_step",
    "ssfusion",
    "ssfusion_groups",
    "tapered_groups",
    "tensor_counts",
    "unfused_groups",
]
