"""What is too small for a message of its own and travels with another of the same round.

Every message wakes every rank, a reduction several times: it goes around a ring. So flags on which the ranks agree ride with
whatever else is sent, and short sums with an all-to-all, which reaches everybody at once. All ranks decide alike, by kinds
and sizes, wherever their memory lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from thinwire.core import AllGather, AllReduce, AllToAll, Reply, Request, memory

MOST_COPIED_BYTES = 64 << 20  # flags travel with no longer reduction: where there is no room behind it, it is copied
MOST_RIDING_BYTES = 128 << 10  # of all sums that ride along, times the ranks: each gets all of them


@dataclass(frozen=True, eq=False)
class AnyOf:
    """Which of the ``flags`` (uint8, 0 or 1) are set on any rank; the reply is a bool tensor. Only within ``merge``.

    Args:
        room: fp32 memory of at least as many elements that may be overwritten. If it lies behind a tensor that is reduced
            in the same round, the flags travel with that without a copy.
    """

    flags: Tensor
    room: Tensor | None = None


def on_board(wanted: Sequence[Request | AnyOf]) -> list[Request]:
    """What is really asked for in a round, one request for each that is wanted."""
    scatters = [r for r in wanted if isinstance(r, AllToAll) and r.partition is None]
    sums = [r for r in wanted if _is_sum(r)]
    rows = len(scatters[0].messages) if scatters else 0
    ride = rows > 0 and rows * sum(r.tensor.nbytes for r in sums) <= MOST_RIDING_BYTES
    asked: list[Request] = []
    for request in wanted:
        if isinstance(request, AnyOf):
            asked.append(_carried(request, [r for r in wanted if not isinstance(r, AnyOf) and r.partition is None]))
        elif ride and _is_sum(request):
            asked.append(AllToAll(request.tensor.reshape(-1).view(torch.uint8).expand(rows, -1)))
        else:
            asked.append(request)
    return asked


def arrived(wanted: Request | AnyOf, asked: Request, reply: Reply) -> Reply:
    """The reply to what was wanted, from the reply to what was asked for instead."""
    if isinstance(wanted, AnyOf):
        return _any_of(reply)
    if asked is wanted:
        return reply
    assert isinstance(wanted, AllReduce)
    tensor = wanted.tensor
    first, *others = (row.view(tensor.dtype) for row in reply)
    total = memory.empty(tensor.numel(), tensor.dtype, tensor.device).copy_(first)
    for other in others:  # rank by rank, so that all ranks get the same bits
        total += other
    return (total.div_(len(reply)) if wanted.op == "mean" else total).view(tensor.shape)


def _is_sum(request: Request | AnyOf) -> TypeGuard[AllReduce]:
    if not isinstance(request, AllReduce) or request.partition is not None:
        return False
    return request.op in ("mean", "sum") and request.tensor.is_floating_point()


def _carried(wanted: AnyOf, others: Sequence[Request]) -> Request:
    """Flags as part of what is sent anyway."""
    flags = wanted.flags
    if any(isinstance(r, AllGather) and not r.varying for r in others):
        return AllGather(flags)
    for other in others:
        if isinstance(other, AllToAll):
            return AllToAll(flags.expand(len(other.messages), -1))
    sums = [r for r in others if _is_sum(r)]
    if sums and sum(r.tensor.nbytes for r in sums) <= MOST_COPIED_BYTES:
        if wanted.room is not None and sums[0].tensor.dtype is wanted.room.dtype:
            return AllReduce(wanted.room[: flags.numel()].copy_(flags), sums[0].op)
        return AllReduce(flags.to(sums[0].tensor.dtype), sums[0].op)
    return AllGather(flags)


def _any_of(reply: Reply) -> Tensor:
    """From one tensor if it was reduced, else from one of each rank."""
    if isinstance(reply, Tensor) and reply.dim() == 1:
        return reply > 0
    return torch.stack(list(reply)).amax(dim=0) > 0
