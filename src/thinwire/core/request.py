"""What an exchange may ask of the ranks. Its driver answers: a simulator, a process group, a byte counter.

Every request prices itself: ``sent_bytes(world_size)`` is what one rank puts on the wire with the usual bandwidth-optimal
algorithm (a ring for reductions and gathers), which is also what gloo and NCCL do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from thinwire.core import memory

Op = Literal["mean", "sum", "max", "min"]
Reply = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Partition:
    """A request to some ranks only: each rank talks to those of its own part, all parts at the same time.

    Args:
        members: the ranks of every part, ascending; every rank is in exactly one. A part of one sends nothing and gets
            back what it gave.
        rank: the rank that asks.
    """

    members: tuple[tuple[int, ...], ...]
    rank: int = field(compare=False)

    @property
    def own(self) -> tuple[int, ...]:
        """The ranks of the asking rank's part."""
        return next(part for part in self.members if self.rank in part)


def _members(partition: Partition | None) -> tuple[tuple[int, ...], ...] | None:
    return None if partition is None else partition.members


def _talking(partition: Partition | None, world_size: int) -> int:
    """How many ranks talk to each other."""
    return world_size if partition is None else len(partition.own)


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Combine ``tensor`` over the ranks; the reply is the same tensor on every rank. ``tensor`` may be overwritten."""

    tensor: Tensor
    op: Op = "mean"
    partition: Partition | None = None

    def sent_bytes(self, world_size: int) -> int:
        ranks = _talking(self.partition, world_size)
        return 2 * (ranks - 1) * self.tensor.nbytes // ranks

    @property
    def signature(self) -> tuple[object, ...]:
        return ("all_reduce", self.op, self.tensor.dtype, tuple(self.tensor.shape), _members(self.partition))


@dataclass(frozen=True, eq=False)
class AllGather:
    """Give every rank everybody's ``message`` (bytes); the reply is one message per rank.

    With ``varying`` the lengths may differ between ranks, at the price of one small message more.

    Args:
        headroom: the message with the free bytes of ``memory.with_headroom`` before it: a header goes there without a copy.
    """

    message: Tensor
    varying: bool = False
    partition: Partition | None = None
    headroom: Tensor | None = None

    @classmethod
    def of(cls, headroom: Tensor) -> AllGather:
        """What lies in memory of ``memory.with_headroom(1, ...)``."""
        return cls(memory.behind_headroom(headroom)[0], headroom=headroom)

    def sent_bytes(self, world_size: int) -> int:
        return (_talking(self.partition, world_size) - 1) * self.message.nbytes

    @property
    def signature(self) -> tuple[object, ...]:
        length = None if self.varying else self.message.numel()
        return ("all_gather", self.varying, length, _members(self.partition))


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Send row ``i`` of ``messages`` (world_size × bytes) to rank ``i``; row ``j`` of the reply came from rank ``j``.

    With ``partition``, row ``i`` goes to the i-th rank of the part.

    Args:
        headroom: as of ``AllGather``.
    """

    messages: Tensor
    partition: Partition | None = None
    headroom: Tensor | None = None

    @classmethod
    def of(cls, headroom: Tensor) -> AllToAll:
        """What lies in memory of ``memory.with_headroom(world_size, ...)``."""
        return cls(memory.behind_headroom(headroom), headroom=headroom)

    def sent_bytes(self, world_size: int) -> int:
        return (_talking(self.partition, world_size) - 1) * self.messages.shape[1]

    @property
    def signature(self) -> tuple[object, ...]:
        return ("all_to_all", tuple(self.messages.shape), _members(self.partition))


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Give every rank the ``tensor`` of rank ``source``; with ``partition``, of the source-th rank of its part."""

    tensor: Tensor
    source: int = 0
    partition: Partition | None = None

    def sent_bytes(self, world_size: int) -> int:
        """The average over the ranks: ``world_size - 1`` copies travel, no matter which rank forwards them."""
        ranks = _talking(self.partition, world_size)
        return (ranks - 1) * self.tensor.nbytes // ranks

    @property
    def signature(self) -> tuple[object, ...]:
        return ("broadcast", self.source, self.tensor.dtype, tuple(self.tensor.shape), _members(self.partition))


Request = AllReduce | AllGather | AllToAll | Broadcast


def alone(request: Request) -> Reply:
    """What a rank gets back that is a part of its own."""
    match request:
        case AllGather():
            return [request.message]
        case AllToAll():
            return request.messages
        case _:
            return request.tensor
