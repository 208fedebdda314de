"""The run-time profile: when gradients are ready, what encoding and messages cost, from the traces of real steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from thinwire.comm.trace import Trace
from thinwire.core import TensorSpec
from thinwire.fusion.profile import Curve, Profile, TensorProfile

WINDOW_STEPS = 8
CONTENDED_SHARE = 0.8  # backward that gets less of a core than this shares it with somebody


class StepProfiler:
    """Keeps the last steps and condenses them into a ``Profile``.

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

    def profile(self) -> Profile:
        """The medians of the window."""
        ready_s = {name: median(step.get(name, 0.0) for step in self._ready_s) for name in self._tensors}
        order = sorted(ready_s, key=lambda name: ready_s[name])
        encode = Curve.fit(sample for step in self._encode for sample in step)
        contended = median(self._core_shares) < CONTENDED_SHARE
        return Profile(
            tensors=tuple(TensorProfile(self._tensors[name], ready_s[name]) for name in order),
            encode=encode,
            message=Curve.fit(sample for step in self._messages for sample in step),
            density=self._density,
            bytes_per_elem=max(self._sent_bytes / (self._elems * self._density), 1e-3),
            # What the smallest group takes to encode and decode is what a group takes whatever its size.
            message_cost_s=encode(0) if contended else 0.0,
        )


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
