"""What is too small for a message of its own and is piggybacked on another one of the same round.

Every message wakes every rank, a reduction several times: it goes around a ring. So the flags of a step travel with whatever
else is sent, and short sums with an all-to-all, which reaches everybody at once. ``carrier`` and ``riders`` decide by kinds
and sizes alone: all ranks decide alike wherever their memory lies, and the planner, which has no tensors, asks them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.core import AllGather, AllReduce, AllToAll, Reply, Request, memory

Kind = Literal["all_reduce", "all_gather", "all_to_all", "broadcast"]

MOST_COPIED_BYTES = 64 << 20  # longer reductions carry no flags: without headroom behind them they would be copied
MOST_PIGGYBACKED_BYTES = 128 << 10  # of all sums that leave with an all-to-all, times the ranks: each gets all of them
SIGNATURE_BITS = 32
SCALAR_SLOTS = 8  # an fp32 scalar is sent in eight values of four bits


def flag_elems(tensors: int, scalars: int, world_size: int) -> int:
    """How many values the flags of a step are (``SmallSum``).

    One says that a gradient is not finite, and one per tensor that it was used. The bits of a signature and their
    complements follow, then the slots of every scalar for every rank.
    """
    return 1 + tensors + 2 * SIGNATURE_BITS + SCALAR_SLOTS * scalars * world_size


def carrier(kinds: Sequence[Kind | None], sizes: Sequence[int]) -> Kind:
    """What the flags leave with; ``all_gather`` also where they need a message of their own.

    Args:
        kinds: what the round asks for, as ``kind_of`` says.
        sizes: bytes of each: the tensor that is reduced, the message that is gathered, one row of an all-to-all.
    """
    for kind in ("all_gather", "all_to_all"):
        if kind in kinds:
            return kind
    reduced_bytes = _reduced_bytes(kinds, sizes)
    return "all_reduce" if "all_reduce" in kinds and reduced_bytes <= MOST_COPIED_BYTES else "all_gather"


def riders(kinds: Sequence[Kind | None], sizes: Sequence[int], world_size: int) -> list[int]:
    """Positions of the sums that leave with an all-to-all: all of them, or none where they are long.

    Args:
        kinds: as for ``carrier``.
        sizes: as for ``carrier``.
    """
    if "all_to_all" not in kinds or world_size * _reduced_bytes(kinds, sizes) > MOST_PIGGYBACKED_BYTES:
        return []
    return [position for position, kind in enumerate(kinds) if kind == "all_reduce"]


def _reduced_bytes(kinds: Sequence[Kind | None], sizes: Sequence[int]) -> int:
    return sum(size for kind, size in zip(kinds, sizes, strict=True) if kind == "all_reduce")


@dataclass(frozen=True, eq=False)
class SmallSum:
    """Flags and other small numbers; the reply is their sum over the ranks, int64. Only within ``merge``.

    The sum is exact, also where it travels in a reduction of 16-bit floats, for values up to 15 that are non-zero on one
    rank only. Elsewhere (flags that several ranks set) only whether it is zero is exact.

    Args:
        values: uint8, one dimension.
        world_size: how many ranks there are: reductions reply with a mean.
        headroom: fp32 memory of at least as many elements that may be overwritten. If it lies behind a tensor that is
            reduced in the same round, the values travel with that without a copy.
    """

    values: Tensor
    world_size: int
    headroom: Tensor | None = None


def kind_of(request: Request | SmallSum) -> Kind | None:
    """What a request is to ``carrier`` and ``riders``; None for what neither carries nor is carried.

    Those are requests to some ranks only, broadcasts, gathers of unequal length and reductions other than of floats to
    their sum or mean.
    """
    if isinstance(request, SmallSum) or request.partition is not None:
        return None
    match request:
        case AllReduce(op="mean" | "sum") if request.tensor.is_floating_point():
            return "all_reduce"
        case AllGather(varying=False):
            return "all_gather"
        case AllToAll():
            return "all_to_all"
        case _:
            return None


def piggyback(wanted: Sequence[Request | SmallSum]) -> list[Request]:
    """What is really asked for in a round, one request for each that is wanted."""
    kinds, sizes = [kind_of(one) for one in wanted], [_nbytes(one) for one in wanted]
    rows = next((len(one.messages) for one in wanted if isinstance(one, AllToAll) and one.partition is None), 0)
    carried = riders(kinds, sizes, rows)
    asked: list[Request] = []
    for position, request in enumerate(wanted):
        if isinstance(request, SmallSum):
            kind = carrier(kinds, sizes)
            asked.append(
                _carried(request, kind, next((r for r, k in zip(wanted, kinds, strict=True) if k == kind), None))
            )
        elif position in carried:
            assert isinstance(request, AllReduce)
            asked.append(AllToAll(request.tensor.reshape(-1).view(torch.uint8).expand(rows, -1)))
        else:
            asked.append(request)
    return asked


def unpack(wanted: Request | SmallSum, asked: Request, reply: Reply) -> Reply:
    """The reply to what was wanted, from the reply to what was asked for instead."""
    if isinstance(wanted, SmallSum):
        return _small_sum(reply, wanted.world_size if isinstance(asked, AllReduce) and asked.op == "mean" else 1)
    if asked is wanted:
        return reply
    assert isinstance(wanted, AllReduce)
    tensor = wanted.tensor
    first, *others = (row.view(tensor.dtype) for row in reply)
    total = memory.empty(tensor.numel(), tensor.dtype, tensor.device).copy_(first)
    for other in others:  # rank by rank, so that all ranks get the same bits
        total += other
    return (total.div_(len(reply)) if wanted.op == "mean" else total).view(tensor.shape)


def _nbytes(request: Request | SmallSum) -> int:
    match request:
        case AllReduce():
            return request.tensor.nbytes
        case AllGather():
            return request.message.nbytes
        case AllToAll():
            return request.messages[0].nbytes
        case _:
            return 0  # neither carries nor is carried


def _carried(wanted: SmallSum, kind: Kind, beside: Request | SmallSum | None) -> Request:
    """Flags in the form of what they leave with.

    Args:
        beside: the first request of that kind; None if there is none.
    """
    values = wanted.values
    if isinstance(beside, AllReduce):
        headroom = wanted.headroom
        if headroom is not None and beside.tensor.dtype is headroom.dtype:
            return AllReduce(headroom[: values.numel()].copy_(values), beside.op)
        return AllReduce(values.to(beside.tensor.dtype), beside.op)
    if isinstance(beside, AllToAll):
        return AllToAll(values.expand(len(beside.messages), -1))
    assert kind == "all_gather"
    return AllGather(values)


def _small_sum(reply: Reply, factor: int) -> Tensor:
    """From one tensor if it was reduced, else from one of each rank.

    Args:
        factor: by which a mean falls short of the sum.
    """
    if isinstance(reply, Tensor) and reply.is_floating_point():
        # bf16 rounds a mean v/P by a relative 2^-9 at most, so P times it is within 0.03 of v <= 15. A flag that one rank
        # of 256 has set arrives as 1/256, a normal number in every format here: it does not vanish.
        return reply.double().mul_(factor).round_().long()
    return torch.stack(list(reply)).sum(dim=0, dtype=torch.int64)
