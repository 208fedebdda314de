"""The best contiguous grouping where one thread encodes and one wire carries: what the other planners are judged against.

Dynamic programming over prefixes. What a prefix leaves behind is the pair (wire free, encoder free); the next message can
only be later if either is later, so per prefix it is enough to keep the pairs that no other pair beats in both, and the
result is exact. Three exact reductions keep these frontiers short:

- Before the next gradient is there nobody needs the encoder, and before it is encoded nobody needs the wire: free times
  are rounded up to that moment, and pairs that differed only in idle time become equal.
- An encoder that is free so early that no later group can make another plan's wire wait for it (``encoder_lead_s``) need
  not be earlier: that other plan is beaten by the wire alone.
- A first search that keeps a few pairs per prefix finds a good plan; pairs whose unavoidable rest ends later are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from thinwire.fusion.costs import GroupCosts
from thinwire.fusion.groups import Groups, groups_of_counts
from thinwire.fusion.profile import ModelProfile

# Sums in another order differ in the last bits; a plan must not be lost for that.
_ROUNDING = 1 + 1e-9
# With one state per prefix the first plan is up to 28 % worse than the best, with three mostly within 1 %.
_FIRST_WIDTH = 3


class _State(NamedTuple):
    """A plan for the first ``end`` tensors; ordered so that the better comes first."""

    wire_free_s: float
    encoder_free_s: float
    groups: int
    end: int
    before: _State | None


class _Rest(NamedTuple):
    """What is known of all groupings of the tensors behind a prefix."""

    wire_s: float  # the least from here to the end on the wire
    encoder_s: float  # the least from here to the end, if the encoder is the bottleneck
    encoder_lead_s: float  # the most by which encoding may overrun the messages sent meanwhile


class _Seconds(NamedTuple):
    """Of every contiguous group, as ``[start][size - 1]``."""

    encode_s: list[list[float]]
    message_s: list[list[float]]


def optimal_groups(profile: ModelProfile, costs: GroupCosts) -> Groups:
    """The contiguous groups whose step ends first; among equals, those with fewer messages."""
    if not profile.tensors:
        return []
    seconds = _seconds(profile, costs)
    rests = _rests(seconds)
    good = _search(profile, seconds, rests, width=_FIRST_WIDTH, bound_s=math.inf)
    best = _search(profile, seconds, rests, width=None, bound_s=good.wire_free_s * _ROUNDING)
    return groups_of_counts(profile.specs, _counts(best))


def _seconds(profile: ModelProfile, costs: GroupCosts) -> _Seconds:
    numels = [tensor.numel for tensor in profile.specs]
    payloads = [costs.payload_elems(numel) for numel in numels]
    starts, per_elem = range(len(numels)), costs.bytes_per_elem
    return _Seconds(
        [[costs.encode(elems) for elems in accumulate(numels[start:])] for start in starts],
        [[costs.message(per_elem * elems) for elems in accumulate(payloads[start:])] for start in starts],
    )


def _rests(seconds: _Seconds) -> list[_Rest]:
    """One per prefix, from the last to the first."""
    count = len(seconds.encode_s)
    rests = [_Rest(0.0, 0.0, 0.0)] * (count + 1)
    for start in reversed(range(count)):
        groups = list(zip(seconds.encode_s[start], seconds.message_s[start], rests[start + 1 :], strict=True))
        encode_to_end_s, message_to_end_s, _ = groups[-1]
        rests[start] = _Rest(
            min(message + rest.wire_s for _, message, rest in groups),
            min([encode_to_end_s + message_to_end_s, *(encode + rest.encoder_s for encode, _, rest in groups[:-1])]),
            max(encode + max(0.0, rest.encoder_lead_s - message) for encode, message, rest in groups),
        )
    return rests


def _search(profile: ModelProfile, seconds: _Seconds, rests: list[_Rest], width: int | None, bound_s: float) -> _State:
    """The best plan with at most ``width`` states per prefix that may end by ``bound_s``."""
    count = len(profile.tensors)
    frontiers = [[_State(0.0, 0.0, 0, 0, None)]]
    for end in range(1, count + 1):
        reached = _extend(frontiers, seconds, profile.ready_s[end - 1], rests[end], bound_s)
        if end < count:
            reached = _rounded_up(reached, profile.ready_s[end], min(seconds.encode_s[end]))
        frontiers.append(_thinned(_undominated(reached, rests[end].encoder_lead_s), width))
    return frontiers[-1][0]


def _extend(
    frontiers: list[list[_State]], seconds: _Seconds, ready_s: float, rest: _Rest, bound_s: float
) -> list[_State]:
    """All promising states behind one more group that ends at the next tensor, which is ready at ``ready_s``."""
    end = len(frontiers)
    sent_by_s, encoded_by_s = bound_s - rest.wire_s, bound_s - rest.encoder_s
    reached: list[_State] = []
    for start, frontier in enumerate(frontiers):
        encode_s, message_s = seconds.encode_s[start][end - start - 1], seconds.message_s[start][end - start - 1]
        for state in frontier:
            encoded_s = max(ready_s, state.encoder_free_s) + encode_s
            sent_s = max(encoded_s, state.wire_free_s) + message_s
            if sent_s <= sent_by_s and encoded_s <= encoded_by_s:
                reached.append(_State(sent_s, encoded_s, state.groups + 1, end, state))
    return reached


def _rounded_up(states: Iterable[_State], ready_s: float, shortest_encode_s: float) -> list[_State]:
    rounded: list[_State] = []
    for wire_free_s, encoder_free_s, groups, end, before in states:
        needed_s = max(encoder_free_s, ready_s)
        rounded.append(_State(max(wire_free_s, needed_s + shortest_encode_s), needed_s, groups, end, before))
    return rounded


def _undominated(states: list[_State], encoder_lead_s: float) -> list[_State]:
    frontier: list[_State] = []
    for state in sorted(states, key=lambda one: one[:3]):
        if frontier and state.wire_free_s >= frontier[0].encoder_free_s + encoder_lead_s:
            break
        if not frontier or state.encoder_free_s < frontier[-1].encoder_free_s:
            frontier.append(state)
    return frontier


def _thinned(frontier: list[_State], width: int | None) -> list[_State]:
    """Evenly over the frontier, from the earliest wire to the earliest encoder."""
    return frontier if width is None else frontier[:: math.ceil(len(frontier) / width)]


def _counts(state: _State) -> list[int]:
    counts: list[int] = []
    while state.before is not None:
        counts.append(state.end - state.before.end)
        state = state.before
    return counts[::-1]
