"""The run-time profile: when gradients are ready, what encoding and messages cost, from the traces of real steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from thinwire.comm.trace import Trace
from thinwire.core import TensorSpec
from thinwire.fusion import Curve, GroupCosts, Groups, ModelProfile
from thinwire.plan import Cluster, GroupWork, Message, simulate_groups

WINDOW_STEPS = 8
CONTENDED_SHARE = 0.8  # backward that gets less of a core than this shares it with somebody


class StepProfiler:
    """Keeps the last steps and condenses them.

    Args:
        density: fraction of the elements that travel, for planners that weigh dense against sparse.
    """

    def __init__(self, tensors: Sequence[TensorSpec], density: float) -> None:
        self._tensors = {tensor.fqn: tensor for tensor in tensors}
        self._density = density
        self._ready_s: deque[dict[str, float]] = deque(maxlen=WINDOW_STEPS)
        self._encode: deque[list[tuple[float, float]]] = deque(maxlen=WINDOW_STEPS)
        self._messages: deque[list[tuple[float, float]]] = deque(maxlen=WINDOW_STEPS)
        self._core_shares: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._elems = self._sent_bytes = 0

    def add(self, ready_s: dict[str, float], trace: Trace, group_elems: Sequence[int], core_share: float) -> None:
        """Take in one step.

        Args:
            group_elems: the sizes of its groups in order of submission.
            core_share: the part of a core that backward has got.
        """
        self._core_shares.append(core_share)
        origin_s = min(ready_s.values(), default=0.0)
        self._ready_s.append({name: at_s - origin_s for name, at_s in ready_s.items()})
        coding_s = [0.0] * len(group_elems)
        for span in trace.spans:
            if span.group >= 0 and span.activity in ("encode", "decode"):
                coding_s[span.group] += span.seconds
        self._encode.append(list(zip(map(float, group_elems), coding_s, strict=True)))
        messages = _message_samples(trace)
        self._messages.append(list(messages.values()))
        self._elems = sum(group_elems)
        self._sent_bytes = sum(span.sent_bytes for span in trace.spans if span.group >= 0)

    def profile(self) -> Measured:
        """The medians of the window."""
        ready_s = {t: median(step.get(name, 0.0) for step in self._ready_s) for name, t in self._tensors.items()}
        profile = ModelProfile.in_ready_order(ready_s, backward_s=max(ready_s.values()))
        encode = Curve.fit(sample for step in self._encode for sample in step)
        message = Curve.fit(sample for step in self._messages for sample in step)
        per_elem = max(self._sent_bytes / (self._elems * self._density), 1e-3)
        contended = median(self._core_shares) < CONTENDED_SHARE
        # What the smallest group takes to encode and decode is what a group takes whatever its size.
        return Measured(profile, GroupCosts(encode, message, self._density, per_elem), encode(0) if contended else 0.0)


@dataclass(frozen=True)
class Measured:
    """A measured step.

    Args:
        message_cost_s: by how much a message delays backward itself, where the two share a core; otherwise 0.
    """

    profile: ModelProfile
    costs: GroupCosts
    message_cost_s: float = 0.0

    def finish_s(self, groups: Groups) -> float:
        """When a step with these groups ends."""
        ready_s = {one.tensor: one.ready_s for one in self.profile.tensors}
        works = [
            GroupWork(
                max(ready_s[tensor] for tensor in group) + index * self.message_cost_s,
                (self.costs.encode_s(group), 0.0),
                ((Message(self.costs.message_s(group)),),),
            )
            for index, group in enumerate(groups)
        ]
        backward_s = self.profile.backward_s + len(groups) * self.message_cost_s
        return simulate_groups(works, backward_s, Cluster(world_size=1)).finish_s

    def relative_drift(self, other: Measured, groups: Groups | None = None) -> float:
        """How far ``other`` is from this: the largest relative change among backward and the sums of the groups' times.

        Sums, because the few microseconds of a bias may double without meaning anything for the plan.
        """
        mine, later = self.profile, other.profile
        if set(mine.specs) != set(later.specs):
            return math.inf
        used = [(tensor,) for tensor in mine.specs] if groups is None else groups
        pairs = [
            (mine.backward_s, later.backward_s),
            (sum(map(self.costs.encode_s, used)), sum(map(other.costs.encode_s, used))),
            (sum(map(self.costs.message_s, used)), sum(map(other.costs.message_s, used))),
        ]
        return max(_relative_change(before, after) for before, after in pairs)


def _relative_change(before: float, after: float) -> float:
    if before == after:
        return 0.0
    return abs(after - before) / before if before > 0 else math.inf


def _message_samples(trace: Trace) -> dict[int, tuple[float, float]]:
    """Per group: bytes sent and seconds on the wire, all rounds together, without the time spent queueing for it.

    The agreement at the end of a step counts too: it is the sample that shows what a message costs before its first byte.
    """
    samples: dict[int, tuple[float, float]] = {}
    free_s = float("-inf")
    for span in sorted((s for s in trace.spans if s.activity == "wire"), key=lambda s: s.end_s):
        sent_bytes, seconds = samples.get(span.group, (0.0, 0.0))
        own_s = span.end_s - max(span.start_s, free_s)
        samples[span.group] = (sent_bytes + span.sent_bytes, seconds + max(own_s, 0.0))
        free_s = max(free_s, span.end_s)
    return samples
