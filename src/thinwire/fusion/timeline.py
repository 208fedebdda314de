"""The step simulator: when would each group be ready, encoded and sent?

One communication thread encodes, one wire carries, both in the order of the groups::

    encode_end_j  = max(ready_j, encode_end_{j-1}) + encode_j
    message_end_j = max(encode_end_j, message_end_{j-1}) + message_j

Where communication shares its core with backward, each message also delays all gradients behind it (``message_cost_s``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thinwire.core import TensorSpec
from thinwire.fusion.groups import Groups
from thinwire.fusion.profile import Profile
from thinwire.fusion.ssfusion import SplitGroup


@dataclass(frozen=True)
class Work:
    """One message before it is scheduled."""

    tensor_count: int
    ready_s: float
    encode_s: float
    message_s: float


@dataclass(frozen=True)
class Sent:
    """One message after it was scheduled; all times count from the start of backward."""

    tensor_count: int
    ready_s: float
    encode_start_s: float
    encode_end_s: float
    message_start_s: float
    message_end_s: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step."""

    messages: tuple[Sent, ...]
    backward_s: float

    @property
    def finish_s(self) -> float:
        """When backward and all messages are done."""
        return max([self.backward_s, *(sent.message_end_s for sent in self.messages)])

    @property
    def exposed_s(self) -> float:
        """How long training waits for the network after backward."""
        return self.finish_s - self.backward_s


def simulate_step(profile: Profile, groups: Groups) -> Timeline:
    """The step with one message per group, sent when its last tensor is there and encoded."""
    ready_s = _ready_times(profile)
    works = (Work(len(g), _last(ready_s, g), profile.encode_s(g), profile.message_s(g)) for g in groups)
    return _schedule(profile, works)


def simulate_split_step(profile: Profile, groups: Sequence[SplitGroup]) -> Timeline:
    """The step with two messages per group: the dense tensors travel while the others are still being selected."""
    ready_s = _ready_times(profile)
    works: list[Work] = []
    for group in groups:
        if group.dense:
            works.append(Work(len(group.dense), _last(ready_s, group.dense), 0.0, profile.message(group.dense_bytes)))
        if group.sparse:
            payload_bytes = group.sparse_elems * profile.bytes_per_elem
            encode_s = profile.encode_s(group.sparse)
            works.append(
                Work(len(group.sparse), _last(ready_s, group.sparse), encode_s, profile.message(payload_bytes))
            )
    return _schedule(profile, works)


def _schedule(profile: Profile, works: Iterable[Work]) -> Timeline:
    encoder_free_s = wire_free_s = delay_s = 0.0
    messages: list[Sent] = []
    for work in works:
        ready_s = work.ready_s + delay_s
        delay_s += profile.message_cost_s
        encode_start_s = max(ready_s, encoder_free_s)
        encoder_free_s = encode_start_s + work.encode_s
        message_start_s = max(encoder_free_s, wire_free_s)
        wire_free_s = message_start_s + work.message_s
        messages.append(Sent(work.tensor_count, ready_s, encode_start_s, encoder_free_s, message_start_s, wire_free_s))
    return Timeline(tuple(messages), profile.backward_s + delay_s)


def _ready_times(profile: Profile) -> dict[str, float]:
    return {one.tensor.fqn: one.ready_s for one in profile.tensors}


def _last(ready_s: dict[str, float], tensors: Sequence[TensorSpec]) -> float:
    return max(ready_s[tensor.fqn] for tensor in tensors)
