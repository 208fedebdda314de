"""From the text of ``fuse=`` to a planner."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.core import ConfigError, TensorSpec
from thinwire.fusion.fixed import fixed_groups, unfused_groups
from thinwire.fusion.groups import Groups
from thinwire.fusion.optimal import optimal_groups
from thinwire.fusion.profile import Profile
from thinwire.fusion.safusion import safusion_groups
from thinwire.fusion.ssfusion import ssfusion_groups

# Large enough that the start-up of a message does not count, small enough that the last group of a step, which nothing
# hides, is short (docs/concepts.md has the measurement).
DEFAULT_CAP_BYTES = 4 << 20
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "kib": 1 << 10, "mib": 1 << 20}
_PROFILED: dict[str, Callable[[Profile], Groups]] = {
    "safusion": safusion_groups,
    "ssfusion": ssfusion_groups,
    "optimal": optimal_groups,
}


@dataclass(frozen=True)
class FusionPlanner:
    """A way to fuse. Call it with tensors in ready order for groups that need no measurement.

    Args:
        name: the text it was made from.
        cap_bytes: of a group as fp32; for planners that need a profile: until they have one. None: no fusion.
        profiled: groups from a measured step; None when measuring changes nothing.
    """

    name: str
    cap_bytes: int | None = DEFAULT_CAP_BYTES
    profiled: Callable[[Profile], Groups] | None = None

    @property
    def needs_profile(self) -> bool:
        """Whether ``plan`` knows better than a call with the tensors alone."""
        return self.profiled is not None

    def __call__(self, tensors: Sequence[TensorSpec]) -> Groups:
        """The groups to start with, before anything was measured."""
        return unfused_groups(tensors) if self.cap_bytes is None else fixed_groups(tensors, self.cap_bytes)

    def plan(self, profile: Profile) -> Groups:
        """The groups for a measured step."""
        return self(profile.specs) if self.profiled is None else self.profiled(profile)


def parse_fusion(text: str) -> FusionPlanner:
    """``"auto"``, ``"none"`` (one group per tensor), a byte cap such as ``"2MiB"``, or a planner by name.

    Raises:
        ConfigError: anything else.
    """
    name = text.strip()
    if name == "auto":
        return FusionPlanner(name)
    if name == "none":
        return FusionPlanner(name, cap_bytes=None)
    if name in _PROFILED:
        return FusionPlanner(name, profiled=_PROFILED[name])
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmM]i?[bB])?", name)
    if match is None:
        known = ", ".join(repr(one) for one in ("auto", "none", *_PROFILED))
        raise ConfigError(f"fuse is {text!r}; expected one of {known} or a size such as '2MiB'")
    return FusionPlanner(name, cap_bytes=int(float(match[1]) * _UNITS[(match[2] or "").lower()]))
