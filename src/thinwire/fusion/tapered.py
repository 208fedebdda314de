"""Groups that shrink towards the end of backward: the default.

What becomes ready early has the whole rest of backward to travel in, so it may travel in large messages; what becomes ready
last is waited for, so it must be little. Sizes double from the last group on, up to a limit, which was measured: groups of up
to 4 MiB took 3 to 6 % less time than those of up to 32 MiB on slow links (docs/log.md). Every message costs processor time
on both sides (on two cores that train four workers, more than the bytes do), so the limit grows with the model, and where
little of it is sent: there are never many groups, nor very short messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core import TensorSpec
from thinwire.fusion.groups import Groups

LAST_BYTES = 2 << 20
CAP_BYTES = 4 << 20
LITTLE = 1 / 8  # wire bytes as a fraction of dense's: with less, messages would be short, so groups may be larger
FULL_GROUPS = 8  # that a model of any size has at most, about


def tapered_groups(
    tensors: Sequence[TensorSpec],
    wire_share: float = 1.0,
    *,
    last_bytes: int = LAST_BYTES,
    cap_bytes: int = CAP_BYTES,
) -> Groups:
    """Consecutive tensors; the last group has about ``last_bytes`` of fp32, each one before it twice as much, up to
    ``cap_bytes`` (more where little of them is sent) or an eighth of them all.

    A tensor that does not fit makes its group larger only if that is not half full without it.

    Args:
        wire_share: wire bytes as a fraction of dense's.
    """
    if wire_share < LITTLE:
        cap_bytes = int(cap_bytes * LITTLE / max(wire_share, 1e-3))
    cap_bytes = max(cap_bytes, sum(4 * tensor.numel for tensor in tensors) // FULL_GROUPS)
    groups: Groups = []
    current: list[TensorSpec] = []
    limit_bytes, size_bytes = last_bytes, 0
    for tensor in reversed(tensors):
        if 2 * size_bytes >= limit_bytes and size_bytes + 4 * tensor.numel > limit_bytes:
            groups.append(tuple(reversed(current)))
            limit_bytes, current, size_bytes = min(2 * limit_bytes, cap_bytes), [], 0
        current.append(tensor)
        size_bytes += 4 * tensor.numel
    if current:
        groups.append(tuple(reversed(current)))
    return groups[::-1]
