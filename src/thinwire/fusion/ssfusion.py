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

from dataclasses import dataclass

from thinwire.core import ConfigError, TensorSpec
from thinwire.fusion.groups import Groups, groups_of_counts
from thinwire.fusion.profile import Profile

TENSORS_PER_GROUP = 20
_DENSE_BYTES = 4


@dataclass(frozen=True)
class SplitGroup:
    """A group in two parts.

    Args:
        tensors: all of them, in ready order.
        theta_elems: tensors of at most this size stay dense.
        density: of the sparse part, so that the whole group sends its budget.
    """

    tensors: tuple[TensorSpec, ...]
    theta_elems: int
    density: float

    @property
    def dense(self) -> tuple[TensorSpec, ...]:
        """The tensors that are all-reduced whole."""
        return tuple(tensor for tensor in self.tensors if tensor.numel <= self.theta_elems)

    @property
    def sparse(self) -> tuple[TensorSpec, ...]:
        """The tensors that are selected from and gathered."""
        return tuple(tensor for tensor in self.tensors if tensor.numel > self.theta_elems)

    @property
    def dense_bytes(self) -> int:
        """Payload of the dense part."""
        return _DENSE_BYTES * sum(tensor.numel for tensor in self.dense)

    @property
    def sparse_elems(self) -> float:
        """Payload elements of the sparse part: a budget, so it need not be whole."""
        return self.density * sum(tensor.numel for tensor in self.sparse)


def ssfusion(profile: Profile, tensors_per_group: int = TENSORS_PER_GROUP) -> list[SplitGroup]:
    """Groups of ``tensors_per_group``, each with its own size cut and density.

    Raises:
        ConfigError: ``tensors_per_group`` is less than one.
    """
    if tensors_per_group < 1:
        raise ConfigError(f"tensors_per_group is {tensors_per_group}; expected at least 1")
    return [_split(profile, group) for group in _aligned(profile.specs, tensors_per_group)]


def ssfusion_groups(profile: Profile) -> Groups:
    """The tensors of SSFusion's groups, without their cuts."""
    return _aligned(profile.specs, TENSORS_PER_GROUP)


def _aligned(tensors: tuple[TensorSpec, ...], count: int) -> Groups:
    full, rest = divmod(len(tensors), count)
    return groups_of_counts(tensors, [count] * full + [rest] * (rest > 0))


def _split(profile: Profile, tensors: tuple[TensorSpec, ...]) -> SplitGroup:
    theta_elems = min(_feasible_cuts(profile, tensors), key=lambda cut: (_cost_s(profile, tensors, cut), cut))
    total = sum(tensor.numel for tensor in tensors)
    dense = _dense_elems(tensors, theta_elems)
    density = (profile.density * total - dense) / (total - dense) if total else profile.density
    return SplitGroup(tensors, theta_elems, density)


def _feasible_cuts(profile: Profile, tensors: tuple[TensorSpec, ...]) -> list[int]:
    budget = profile.density * sum(tensor.numel for tensor in tensors)
    sizes = {tensor.numel for tensor in tensors}
    return [0, *(size for size in sizes if size > 0 and _dense_elems(tensors, size) < budget)]


def _dense_elems(tensors: tuple[TensorSpec, ...], theta_elems: int) -> int:
    return sum(tensor.numel for tensor in tensors if tensor.numel <= theta_elems)


def _cost_s(profile: Profile, tensors: tuple[TensorSpec, ...], theta_elems: int) -> float:
    """Without ``T_b``, which is the same for every cut."""
    sparse = [tensor.numel for tensor in tensors if tensor.numel > theta_elems]
    sparse_bytes = profile.bytes_per_elem * sum(profile.payload_elems(size) for size in sparse)
    message_s = profile.message(_DENSE_BYTES * _dense_elems(tensors, theta_elems) + sparse_bytes)
    return sum(profile.encode(size) for size in sparse) + message_s
