"""SSFusion (ICDE 2026): within a group, sparsify only the tensors where selecting pays.

Per group of ``S`` elements a size cut ``theta``: tensors of at most ``theta`` elements stay dense and are all-reduced, the
others are selected and gathered. Candidates for ``theta`` are 0 and each size in the group, as long as the dense
elements ``F`` stay below the budget ``density * S``. The cheapest by

    cost(theta) = T_b + sum over s > theta of T_cp(s) + T_cm(dense part + sum over s > theta of max(1, floor(density * s)))

is taken, and the others get ``density' = (density * S - F) / (S - F)``, so that the group sends its budget exactly.

``T_cm`` is measured in bytes here: dense elements travel without an index and count 4 bytes each. The rules follow the
authors' public code; the paper's own figures are unknown to us.
"""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core import ConfigError, TensorSpec
from thinwire.fusion.costs import GroupCosts
from thinwire.fusion.groups import GroupPlan, Groups, groups_of_counts, names_of
from thinwire.fusion.profile import ModelProfile

TENSORS_PER_GROUP = 20
_DENSE_BYTES = 4


def ssfusion(profile: ModelProfile, costs: GroupCosts, tensors_per_group: int = TENSORS_PER_GROUP) -> list[GroupPlan]:
    """Groups of ``tensors_per_group``, each with its own dense part and density.

    Raises:
        ConfigError: ``tensors_per_group`` is less than one.
    """
    return [_split(group, costs) for group in ssfusion_groups(profile, costs, tensors_per_group)]


def ssfusion_groups(profile: ModelProfile, costs: GroupCosts, tensors_per_group: int = TENSORS_PER_GROUP) -> Groups:
    """The tensors of SSFusion's groups, without their cuts: the same number in each, whatever they cost."""
    if tensors_per_group < 1:
        raise ConfigError(f"tensors_per_group is {tensors_per_group}; expected at least 1")
    full, rest = divmod(len(profile.specs), tensors_per_group)
    return groups_of_counts(profile.specs, [tensors_per_group] * full + [rest] * (rest > 0))


def _split(tensors: Sequence[TensorSpec], costs: GroupCosts) -> GroupPlan:
    theta_elems = min(_feasible_cuts(tensors, costs), key=lambda cut: (_cost_s(tensors, cut, costs), cut))
    total, dense = sum(tensor.numel for tensor in tensors), _dense_elems(tensors, theta_elems)
    density = (costs.density * total - dense) / (total - dense) if total else costs.density
    kept = [tensor for tensor in tensors if tensor.numel <= theta_elems]
    return GroupPlan(names_of(tensors), names_of(kept), density if len(kept) < len(tensors) else None)


def _feasible_cuts(tensors: Sequence[TensorSpec], costs: GroupCosts) -> list[int]:
    budget = costs.density * sum(tensor.numel for tensor in tensors)
    sizes = {tensor.numel for tensor in tensors}
    return [0, *(size for size in sizes if size > 0 and _dense_elems(tensors, size) < budget)]


def _dense_elems(tensors: Sequence[TensorSpec], theta_elems: int) -> int:
    return sum(tensor.numel for tensor in tensors if tensor.numel <= theta_elems)


def _cost_s(tensors: Sequence[TensorSpec], theta_elems: int, costs: GroupCosts) -> float:
    """Without ``T_b``, which is the same for every cut."""
    sparse = [tensor.numel for tensor in tensors if tensor.numel > theta_elems]
    sparse_bytes = costs.bytes_per_elem * sum(costs.payload_elems(size) for size in sparse)
    message_s = costs.message(_DENSE_BYTES * _dense_elems(tensors, theta_elems) + sparse_bytes)
    return sum(costs.encode(size) for size in sparse) + message_s
