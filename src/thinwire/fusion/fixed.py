"""Fusion by a byte cap, as DDP does, and no fusion at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from thinwire.core import ConfigError, TensorSpec

Groups = list[tuple[TensorSpec, ...]]
FusionPlanner = Callable[[Sequence[TensorSpec]], Groups]

# Large enough that the start-up of a message does not count, small enough that the last group of a step, which nothing
# hides, is short (docs/concepts.md has the measurement).
DEFAULT_CAP_BYTES = 4 << 20
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "kib": 1 << 10, "mib": 1 << 20}


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


def parse_fusion(text: str) -> FusionPlanner:
    """``"auto"``, ``"none"`` (one group per tensor) or a byte cap such as ``"2MiB"``.

    Raises:
        ConfigError: anything else.
    """
    if text == "auto":
        return lambda tensors: fixed_groups(tensors, DEFAULT_CAP_BYTES)
    if text == "none":
        return lambda tensors: [(tensor,) for tensor in tensors]
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmM]i?[bB])?", text.strip())
    if match is None:
        raise ConfigError(f"fuse is {text!r}; expected 'auto', 'none' or a size such as '2MiB'")
    cap_bytes = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    return lambda tensors: fixed_groups(tensors, cap_bytes)
