"""The best contiguous grouping in the model of ``timeline``: what the other planners are judged against.

Dynamic programming over prefixes. What a prefix leaves behind is the pair (wire free, encoder free); the next message can
only be later if either is later, so per prefix it is enough to keep the pairs that no other pair beats in both, and the
result is exact. Two exact reductions keep these frontiers short:

- Before the next gradient is there nobody needs the encoder, and before it is encoded nobody needs the wire: free times
  are rounded up to that moment, and pairs that differed only in idle time become equal.
- When no group takes longer to encode than to send, an encoder that is free ``longest encode`` before another plan's
  wire will never make the wire wait longer than that plan does: the other plan is beaten by the wire alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from thinwire.fusion.groups import Groups, groups_of_counts
from thinwire.fusion.profile import Profile


class _State(NamedTuple):
    """A plan for the first ``end`` tensors; ordered so that the better comes first."""

    wire_free_s: float
    encoder_free_s: float
    groups: int
    end: int
    before: _State | None


class _Costs(NamedTuple):
    """Seconds of every contiguous group, as ``[start][size - 1]``."""

    encode_s: list[list[float]]
    message_s: list[list[float]]


def optimal_groups(profile: Profile) -> Groups:
    """The contiguous groups whose step ends first; among equals, those with fewer messages."""
    if not profile.tensors:
        return []
    costs = _group_costs(profile)
    leads_s, count = _encoder_leads(costs), len(profile.tensors)
    frontiers = [[_State(0.0, 0.0, 0, 0, None)]]
    for end in range(1, count + 1):
        reached = _extend(frontiers, costs, profile.ready_s[end - 1])
        if end < count:
            reached = _rounded_up(reached, profile.ready_s[end], min(costs.encode_s[end]))
        frontiers.append(_undominated(reached, leads_s[end]))
    return groups_of_counts(profile.specs, _counts(frontiers[-1][0]))


def _group_costs(profile: Profile) -> _Costs:
    numels = [tensor.numel for tensor in profile.specs]
    payloads = [profile.payload_elems(numel) for numel in numels]
    starts, per_elem = range(len(numels)), profile.bytes_per_elem
    return _Costs(
        [[profile.encode(elems) for elems in accumulate(numels[start:])] for start in starts],
        [[profile.message(per_elem * elems) for elems in accumulate(payloads[start:])] for start in starts],
    )


def _encoder_leads(costs: _Costs) -> list[float]:
    """Per prefix, how long before the wire the encoder must be free so that no later group waits for it in vain.

    The largest sum of encode times minus the messages sent meanwhile, over all ways to group what follows.
    """
    count = len(costs.encode_s)
    leads_s = [0.0] * (count + 1)
    for start in reversed(range(count)):
        groups = zip(costs.encode_s[start], costs.message_s[start], leads_s[start + 1 :], strict=True)
        leads_s[start] = max(encode + max(0.0, lead - message) for encode, message, lead in groups)
    return leads_s


def _extend(frontiers: list[list[_State]], costs: _Costs, ready_s: float) -> list[_State]:
    """All states behind one more group that ends at the next tensor, which is ready at ``ready_s``."""
    end = len(frontiers)
    reached: list[_State] = []
    for start, frontier in enumerate(frontiers):
        encode_s, message_s = costs.encode_s[start][end - start - 1], costs.message_s[start][end - start - 1]
        for state in frontier:
            encoded_s = max(ready_s, state.encoder_free_s) + encode_s
            sent_s = max(encoded_s, state.wire_free_s) + message_s
            reached.append(_State(sent_s, encoded_s, state.groups + 1, end, state))
    return reached


def _rounded_up(states: Iterable[_State], ready_s: float, shortest_encode_s: float) -> list[_State]:
    rounded: list[_State] = []
    for wire_free_s, encoder_free_s, groups, end, before in states:
        needed_s = max(encoder_free_s, ready_s)
        rounded.append(_State(max(wire_free_s, needed_s + shortest_encode_s), needed_s, groups, end, before))
    return rounded


def _undominated(states: list[_State], lead_s: float) -> list[_State]:
    frontier: list[_State] = []
    for state in sorted(states, key=lambda one: one[:3]):
        if frontier and state.wire_free_s >= frontier[0].encoder_free_s + lead_s:
            break
        if not frontier or state.encoder_free_s < frontier[-1].encoder_free_s:
            frontier.append(state)
    return frontier


def _counts(state: _State) -> list[int]:
    counts: list[int] = []
    while state.before is not None:
        counts.append(state.end - state.before.end)
        state = state.before
    return counts[::-1]
