"""What an exchange may ask of the ranks. Whoever drives it answers: a simulator, a process group, a byte counter.

Every request prices itself: ``sent_bytes(world_size)`` is what one rank puts on the wire with the usual bandwidth-optimal
algorithm (a ring for reductions and gathers), which is also what gloo and NCCL do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Op = Literal["mean", "sum", "max", "min"]
Reply = Tensor | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Combine ``tensor`` over the ranks; the reply is the same tensor on every rank. ``tensor`` may be overwritten."""

    tensor: Tensor
    op: Op = "mean"

    def sent_bytes(self, world_size: int) -> int:
        return 2 * (world_size - 1) * self.tensor.nbytes // world_size

    @property
    def signature(self) -> tuple[object, ...]:
        return ("all_reduce", self.op, self.tensor.dtype, tuple(self.tensor.shape))


@dataclass(frozen=True, eq=False)
class AllGather:
    """Give every rank everybody's ``message`` (bytes); the reply is one message per rank.

    With ``varying`` the lengths may differ between ranks, at the price of one small message more.
    """

    message: Tensor
    varying: bool = False

    def sent_bytes(self, world_size: int) -> int:
        return (world_size - 1) * self.message.nbytes

    @property
    def signature(self) -> tuple[object, ...]:
        return ("all_gather", self.varying, None if self.varying else self.message.numel())


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Send row ``i`` of ``messages`` (world_size × bytes) to rank ``i``; row ``j`` of the reply came from rank ``j``."""

    messages: Tensor

    def sent_bytes(self, world_size: int) -> int:
        return (world_size - 1) * self.messages.shape[1]

    @property
    def signature(self) -> tuple[object, ...]:
        return ("all_to_all", tuple(self.messages.shape))


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Give every rank the ``tensor`` of rank ``source``."""

    tensor: Tensor
    source: int = 0

    def sent_bytes(self, world_size: int) -> int:
        """The average over the ranks: ``world_size - 1`` copies travel, whoever forwards them."""
        return (world_size - 1) * self.tensor.nbytes // world_size

    @property
    def signature(self) -> tuple[object, ...]:
        return ("broadcast", self.source, self.tensor.dtype, tuple(self.tensor.shape))


Request = AllReduce | AllGather | AllToAll | Broadcast
