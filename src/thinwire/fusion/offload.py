"""SSFusion's host offload: let the CPU select some tensors while the accelerator computes and selects the others.

Greedy, group by group. Time advances with the gradients: a tensor goes to the host if the host is free when its gradient
is there, otherwise it is selected on the device. The last offload of a group is undone if the group would be selected
sooner without it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from thinwire.core import TensorSpec
from thinwire.fusion.curve import Curve
from thinwire.fusion.groups import Groups
from thinwire.fusion.profile import ModelProfile, TensorProfile


class _Clock(NamedTuple):
    """When the two selectors are free, and when the last tensor of the group was selected."""

    device_free_s: float = 0.0
    host_free_s: float = 0.0
    selected_s: float = 0.0


def offload(profile: ModelProfile, device: Curve, groups: Groups, host: Curve) -> Groups:
    """The tensors of each group that the host should select.

    Args:
        device: seconds to select from a tensor of so many elements on the device.
        groups: the tensors of each fusion group that are selected from at all.
        host: seconds to move one tensor of so many elements to the host and select there.
    """
    known = {one.tensor: one for one in profile.tensors}
    clock, chosen = _Clock(), []
    for group in groups:
        members = [known[tensor] for tensor in group]
        on_host = _greedy(members, host, clock.host_free_s)
        kept, undone = (_select(members, names, device, host, clock) for names in (on_host, on_host[:-1]))
        if undone.selected_s < kept.selected_s:
            on_host, kept = on_host[:-1], undone
        chosen.append(tuple(on_host))
        clock = kept._replace(selected_s=0.0)
    return chosen


def _greedy(members: list[TensorProfile], host: Curve, host_free_s: float) -> list[TensorSpec]:
    on_host: list[TensorSpec] = []
    for one in members:
        if host_free_s <= one.ready_s:
            on_host.append(one.tensor)
            host_free_s = one.ready_s + host(one.tensor.numel)
    return on_host


def _select(
    members: list[TensorProfile], on_host: Collection[TensorSpec], device: Curve, host: Curve, clock: _Clock
) -> _Clock:
    device_free_s, host_free_s, selected_s = clock
    for one in members:
        if one.tensor in on_host:
            host_free_s = max(host_free_s, one.ready_s) + host(one.tensor.numel)
            selected_s = max(selected_s, host_free_s)
        else:
            device_free_s = max(device_free_s, one.ready_s) + device(one.tensor.numel)
            selected_s = max(selected_s, device_free_s)
    return _Clock(device_free_s, host_free_s, selected_s)
