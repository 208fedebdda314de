"""The interface between an exchange and the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from thinwire.core import Reply, Request


class Tag(NamedTuple):
    """Which message this is. All ranks must give the same tag to the same message.

    Args:
        step: number of the transaction in its channel; for gradients this is the training step.
        channel: its number; 0 belongs to the link (barriers, objects).
    """

    step: int = 0
    group: int = 0
    round: int = 0
    channel: int = 0

    def __str__(self) -> str:
        return f"step {self.step}, group {self.group}, round {self.round}"


class Pending(Protocol):
    """A request under way.

    Attributes:
        sent_bytes: what this rank sends for it. Final once ``wait`` has returned: some lengths are agreed on the way.
    """

    @property
    def sent_bytes(self) -> int: ...

    def wait(self) -> Reply: ...


class Transport(Protocol):
    """Answers requests. ``start`` and ``wait`` must be called in the same order on all ranks, within each lane.

    Round r of a group travels in lane r; rounds beyond the last lane share it. Messages of different lanes may be started
    from different threads and in any order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def lanes(self) -> int: ...

    def start(self, request: Request, tag: Tag) -> Pending: ...


def fit_lanes(rounds: Iterable[int | None], lanes: int) -> bool:
    """Whether exchanges of at most so many rounds travel in lanes (None: not known).

    Not where all take one round: there is nothing to overtake, and handing a group from thread to thread takes time.
    """
    counts = list(rounds)
    return all(count is not None and count <= lanes for count in counts) and any(count != 1 for count in counts)


@dataclass
class Later:
    """A reply that ``wait`` computes."""

    finish: Callable[[], Reply]
    sent_bytes: int = 0

    def wait(self) -> Reply:
        return self.finish()
