"""SAFusion (HPDC 2025): groups that are ready just before the wire is free, by tensor count.

With ``T_b(i)``, ``T_cp(i)`` and ``T_cm(i)`` for backward, compression and communication of group ``i``:

1. The first group is the smallest for which ``T_b(1) + T_cm(1)`` is less than sending its tensors one by one; a single
   tensor if there is none.
2. Group ``i`` takes as many tensors as fit ``T_b(i) + T_cp(i) <= T_cm(i-1)``, at least one.
3. From the first ``M'`` with ``sum of T_cm(i), i <= M' > sum of T_b(j) + T_cp(j), j >= 2`` on, all that follows group ``M'``
   is one group: nothing can hide it, so only start-ups are left to save.

Two readings are ours. In 1, the group is closed as soon as fusing pays: growing while it pays would never end where a
start-up costs more than the backward of one tensor, and nothing would overlap. In 2, the paper compares with the previous
message alone; where messages queue up, the wire is free only after all of them, and groups sized for the last one are too
small and pay too many start-ups. ``carry_backlog=False`` is the rule of the paper (docs/results/fusion.md compares them).
"""

from __future__ import annotations

from thinwire.fusion.costs import GroupCosts
from thinwire.fusion.groups import Groups, groups_of_counts
from thinwire.fusion.profile import ModelProfile


def safusion_groups(profile: ModelProfile, costs: GroupCosts, *, carry_backlog: bool = True) -> Groups:
    """Groups that keep the wire busy with as few messages as possible.

    Args:
        profile: the measured step.
        costs: of encoding and sending its groups.
        carry_backlog: size a group for the time until the wire is free, not for the previous message alone.
    """
    if not profile.tensors:
        return []
    sizes = _adaptive_sizes(profile, costs, carry_backlog)
    return groups_of_counts(profile.specs, _merge_tail(profile, costs, sizes))


def _first_size(profile: ModelProfile, costs: GroupCosts) -> int:
    one_by_one_s = 0.0
    for size, tensor in enumerate(profile.specs, start=1):
        one_by_one_s = max(one_by_one_s, profile.ready_s[size - 1]) + costs.message_s([tensor])
        if profile.ready_s[size - 1] + costs.message_s(profile.specs[:size]) < one_by_one_s:
            return size
    return 1


def _adaptive_sizes(profile: ModelProfile, costs: GroupCosts, carry_backlog: bool) -> list[int]:
    sizes, start = [_first_size(profile, costs)], 0
    encoder_free_s = wire_free_s = 0.0
    while True:
        group = profile.specs[start : start + sizes[-1]]
        start += len(group)
        ready_s = profile.ready_s[start - 1]
        if carry_backlog:
            encoder_free_s = max(encoder_free_s, ready_s) + costs.encode_s(group)
            wire_free_s = max(encoder_free_s, wire_free_s) + costs.message_s(group)
        else:
            encoder_free_s, wire_free_s = ready_s, ready_s + costs.message_s(group)
        if start == len(profile.specs):
            return sizes
        sizes.append(_fitting_size(profile, costs, start, encoder_free_s, wire_free_s))


def _fitting_size(
    profile: ModelProfile, costs: GroupCosts, start: int, encoder_free_s: float, wire_free_s: float
) -> int:
    """How many tensors from ``start`` on can be ready and encoded when the wire is free; at least one."""
    size = 1
    while start + size < len(profile.specs):
        encode_s = costs.encode_s(profile.specs[start : start + size + 1])
        if max(profile.ready_s[start + size], encoder_free_s) + encode_s > wire_free_s:
            break
        size += 1
    return size


def _merge_tail(profile: ModelProfile, costs: GroupCosts, sizes: list[int]) -> list[int]:
    groups = groups_of_counts(profile.specs, sizes)
    to_hide_behind_s = profile.backward_s - profile.ready_s[sizes[0] - 1] + sum(map(costs.encode_s, groups[1:]))
    sent_s = 0.0
    for index, group in enumerate(groups[:-1], start=1):
        sent_s += costs.message_s(group)
        if sent_s > to_hide_behind_s:
            return [*sizes[:index], sum(sizes[index:])]
    return sizes
