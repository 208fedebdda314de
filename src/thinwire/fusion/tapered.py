"""Groups that shrink towards the end of backward: the default.

What becomes ready early has the whole rest of backward to travel in, so it may travel in few large messages; what becomes
ready last is waited for, so it must be little. Every message costs processor time on both sides (on two cores that train
four workers, more than the bytes do), so the sizes double from the last group to the first: their number grows with the
logarithm of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core import TensorSpec
from thinwire.fusion.groups import Groups

LAST_BYTES = 2 << 20
CAP_BYTES = 32 << 20


def tapered_groups(tensors: Sequence[TensorSpec], last_bytes: int = LAST_BYTES, cap_bytes: int = CAP_BYTES) -> Groups:
    """Consecutive tensors; the last group has about ``last_bytes`` of fp32, each one before it twice as much.

    A tensor that does not fit makes its group larger only if the group would be empty without it.
    """
    groups: Groups = []
    current: list[TensorSpec] = []
    limit_bytes, size_bytes = last_bytes, 0
    for tensor in reversed(tensors):
        if current and size_bytes + 4 * tensor.numel > limit_bytes:
            groups.append(tuple(reversed(current)))
            limit_bytes, current, size_bytes = min(2 * limit_bytes, cap_bytes), [], 0
        current.append(tensor)
        size_bytes += 4 * tensor.numel
    if current:
        groups.append(tuple(reversed(current)))
    return groups[::-1]
