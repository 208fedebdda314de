"""From the text of ``fuse=`` to a planner."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.core import Compressor, ConfigError, Schedule, TensorSpec
from thinwire.fusion.costs import GroupCosts
from thinwire.fusion.fixed import fixed_groups, unfused_groups
from thinwire.fusion.groups import Groups, density_of
from thinwire.fusion.optimal import optimal_groups
from thinwire.fusion.profile import ModelProfile
from thinwire.fusion.safusion import safusion_groups
from thinwire.fusion.ssfusion import ssfusion_groups
from thinwire.fusion.tapered import tapered_groups

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "kib": 1 << 10, "mib": 1 << 20}
_PROFILED: dict[str, Callable[[ModelProfile, GroupCosts], Groups]] = {
    "safusion": safusion_groups,
    "ssfusion": ssfusion_groups,
    "ssfusion+host": ssfusion_groups,
    "optimal": optimal_groups,
}


@dataclass(frozen=True)
class FusionPlanner:
    """A way to fuse. Call it with tensors in ready order for groups that need no measurement.

    Args:
        name: the text it was made from.
        unmeasured: groups from the tensors, and the share of their bytes that is sent; for planners that need a profile:
            until they have one.
        profiled: groups from a measured step; None when measuring changes nothing.
    """

    name: str
    unmeasured: Callable[[Sequence[TensorSpec], float], Groups] = tapered_groups
    profiled: Callable[[ModelProfile, GroupCosts], Groups] | None = None

    @property
    def needs_profile(self) -> bool:
        """Whether ``plan`` knows better than a call with the tensors alone."""
        return self.profiled is not None

    @property
    def splits(self) -> bool:
        """Whether groups have a dense and a sparse part."""
        return self.name.startswith("ssfusion")

    @property
    def offloads(self) -> bool:
        """Whether the host selects part of the tensors."""
        return self.name.endswith("+host")

    def __call__(self, tensors: Sequence[TensorSpec], wire_share: float = 1.0) -> Groups:
        """The groups to start with, before anything was measured.

        Args:
            wire_share: wire bytes as a fraction of dense's.
        """
        return self.unmeasured(tensors, wire_share)

    def plan(self, profile: ModelProfile, costs: GroupCosts) -> Groups:
        """The groups for a measured step."""
        return self(profile.specs) if self.profiled is None else self.profiled(profile, costs)

    def check(self, compressor: Compressor) -> None:
        """Raises:
        ConfigError: this fusion needs another compressor.
        """
        density = density_of(compressor)
        if self.splits and density is None:
            raise ConfigError(
                f"fuse={self.name!r} weighs dense against sparse; {compressor} has no density. Use 'safusion'"
            )
        if self.splits and isinstance(density, Schedule):
            raise ConfigError(
                f"fuse={self.name!r} sets densities itself; {compressor} has one that changes. Use 'safusion'"
            )


def parse_fusion(text: str) -> FusionPlanner:
    """``"auto"``, ``"none"`` (one group per tensor), a byte cap such as ``"2MiB"``, or a planner by name.

    Raises:
        ConfigError: anything else.
    """
    name = text.strip()
    if name == "auto":
        return FusionPlanner(name)
    if name == "none":
        return FusionPlanner(name, lambda tensors, _: unfused_groups(tensors))
    if name in _PROFILED:
        return FusionPlanner(name, profiled=_PROFILED[name])
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmM]i?[bB])?", name)
    if match is None:
        known = ", ".join(repr(one) for one in ("auto", "none", *_PROFILED))
        raise ConfigError(f"fuse is {text!r}; expected one of {known} or a size such as '2MiB'")
    cap_bytes = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    return FusionPlanner(name, lambda tensors, _: fixed_groups(tensors, cap_bytes))
