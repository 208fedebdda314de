"""Several exchanges as one: the requests of each round become one message per kind.

A fusion group runs its units' exchanges side by side. What they ask for in the same round is merged: all reductions of the
same operator and dtype, all gathers, all scatters, as far as they address the same ranks. So a group costs one message per
kind and round, however many units it has, and units that need fewer rounds simply drop out. What is small is piggybacked
on something else (``comm.piggyback``).
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from thinwire.comm.piggyback import SmallSum, piggyback, unpack
from thinwire.core import AllGather, AllReduce, AllToAll, Broadcast, Reply, Request, memory
from thinwire.core.side_by_side import Asked, Asking, Round, side_by_side

Merged = Generator[tuple[Request, ...], Any, list[Any]]


def merge(exchanges: Sequence[Asking]) -> Merged:
    """Run ``exchanges`` side by side; yields one tuple of merged requests per round, returns their results in order."""
    return (yield from side_by_side(exchanges, _ask))


def _ask(asked: Asked) -> Round:
    """One round: merge by kind, ask, and hand every exchange its own part of the replies."""
    wanted = [(index, r) for index, one in asked.items() for r in (one if isinstance(one, tuple) else (one,))]
    if len(wanted) == len(asked) == 1 and not isinstance(wanted[0][1], SmallSum):  # by far the most rounds
        index, request = wanted[0]
        (reply,) = yield (request,)
        return {index: (reply,) if isinstance(asked[index], tuple) else reply}
    requests = piggyback([request for _, request in wanted])
    together = batches([_kind(request, position) for position, request in enumerate(requests)])
    batched = [[requests[position] for position in members] for members in together]
    merged_replies = yield tuple(_join(batch) for batch in batched)
    parts: dict[int, Reply] = {}
    for members, batch, reply in zip(together, batched, merged_replies, strict=True):
        parts.update(zip(members, _part(batch, reply), strict=True))
    replies: dict[int, list[Reply]] = {index: [] for index in asked}
    for position, (index, request) in enumerate(wanted):
        replies[index].append(unpack(request, requests[position], parts[position]))
    return {index: tuple(got) if isinstance(asked[index], tuple) else got[0] for index, got in replies.items()}


def batches(kinds: Sequence[Hashable]) -> list[list[int]]:
    """Positions of the requests that become one message each, in the order of the messages. The planner asks too."""
    members: dict[Hashable, list[int]] = {}
    for position, kind in enumerate(kinds):
        members.setdefault(kind, []).append(position)
    return list(members.values())


def aligned(nbytes: int) -> int:
    """With padding to 8 bytes, so that what follows in a merged message can be viewed as any dtype."""
    return -(-nbytes // 8) * 8


def _kind(request: Request, position: int) -> Hashable:
    """Requests of equal kind travel together. What cannot be merged is its own kind."""
    match request:
        case AllReduce():
            return ("all_reduce", request.op, request.tensor.dtype, request.partition)
        case AllGather(varying=False):
            return ("all_gather", request.partition)
        case AllToAll():
            return ("all_to_all", request.partition)
        case _:
            return position


def _join(batch: Sequence[Request]) -> Request:
    first = batch[0]
    if len(batch) == 1:
        return first
    match first:
        case AllReduce():
            tensors = [r.tensor.reshape(-1) for r in batch]  # type: ignore[union-attr]
            whole = memory.joined(tensors)
            return replace(first, tensor=memory.cat(tensors) if whole is None else whole)
        case AllGather():
            return replace(AllGather.of(_side_by_side([r.message[None] for r in batch])), partition=first.partition)  # type: ignore[union-attr]
        case AllToAll():
            return replace(AllToAll.of(_side_by_side([r.messages for r in batch])), partition=first.partition)  # type: ignore[union-attr]
        case Broadcast():
            raise AssertionError("broadcasts are never merged")


def _part(batch: Sequence[Request], reply: Any) -> list[Reply]:
    """Cut the reply to a merged request into the replies to its members."""
    first = batch[0]
    if len(batch) == 1:
        return [reply]
    if isinstance(first, AllReduce):
        tensors = [r.tensor for r in batch]  # type: ignore[union-attr]
        pieces = reply.split([t.numel() for t in tensors])
        return [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]
    lengths = [r.message.numel() if isinstance(r, AllGather) else r.messages.shape[1] for r in batch]  # type: ignore[union-attr]
    padded = [aligned(length) for length in lengths]
    if isinstance(reply, Tensor):
        return [part[:, :length] for part, length in zip(reply.split(padded, dim=1), lengths, strict=True)]
    rows = [row.split(padded) for row in reply]
    return [[row[member][:length] for row in rows] for member, length in enumerate(lengths)]


def _side_by_side(matrices: Sequence[Tensor]) -> Tensor:
    """Side by side behind some headroom, each with its padding."""
    first, padded = matrices[0], [aligned(matrix.shape[1]) for matrix in matrices]
    whole = memory.with_headroom(len(first), sum(padded), first.device)
    places = memory.behind_headroom(whole).split(padded, dim=1)
    for place, matrix in zip(places, matrices, strict=True):
        place[:, : matrix.shape[1]] = matrix
        place[:, matrix.shape[1] :] = 0
    return whole
