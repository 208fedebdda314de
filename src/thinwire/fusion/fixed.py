"""Fusion by a byte cap, as DDP does, and no fusion at all. Neither needs a profile."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core import TensorSpec
from thinwire.fusion.groups import Groups


def unfused_groups(tensors: Sequence[TensorSpec]) -> Groups:
    """One message per tensor."""
    return [(tensor,) for tensor in tensors]


def fixed_groups(tensors: Sequence[TensorSpec], cap_bytes: int) -> Groups:
    """Consecutive tensors, closed before they would exceed ``cap_bytes`` of fp32. A larger tensor is a group of its own."""
    groups: Groups = []
    current: list[TensorSpec] = []
    for tensor in tensors:
        if current and 4 * (sum(t.numel for t in current) + tensor.numel) > cap_bytes:
            groups.append(tuple(current))
            current = []
        current.append(tensor)
    if current:
        groups.append(tuple(current))
    return groups
