"""Several exchanges as one: the requests of each round become one message per kind.

A fusion group runs its units' exchanges side by side. What they ask for in the same round is merged: all reductions of the
same operator and dtype, all gathers, all scatters, as far as they address the same ranks. So a group costs one message per
kind and round, however many units it has, and units that need fewer rounds simply drop out. What is small is piggybacked
on something else (``comm.piggyback``).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
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
    kinds: dict[object, list[int]] = {}
    for position, request in enumerate(requests):
        kinds.setdefault(_kind(request, position), []).append(position)
    batches = [[requests[position] for position in members] for members in kinds.values()]
    merged_replies = yield tuple(_join(batch) for batch in batches)
    parts: dict[int, Reply] = {}
    for members, batch, reply in zip(kinds.values(), batches, merged_replies, strict=True):
        parts.update(zip(members, _part(batch, reply), strict=True))
    replies: dict[int, list[Reply]] = {index: [] for index in asked}
    for position, (index, request) in enumerate(wanted):
        replies[index].append(unpack(request, requests[position], parts[position]))
    return {index: tuple(got) if isinstance(asked[index], tuple) else got[0] for index, got in replies.items()}


def _kind(request: Request, position: int) -> object:
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
            return replace(AllGather.of(_aligned([r.message[None] for r in batch])), partition=first.partition)  # type: ignore[union-attr]
        case AllToAll():
            return replace(AllToAll.of(_aligned([r.messages for r in batch])), partition=first.partition)  # type: ignore[union-attr]
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
    padded = [-(-length // 8) * 8 for length in lengths]
    if isinstance(reply, Tensor):
        return [part[:, :length] for part, length in zip(reply.split(padded, dim=1), lengths, strict=True)]
    rows = [row.split(padded) for row in reply]
    return [[row[member][:length] for row in rows] for member, length in enumerate(lengths)]


def _aligned(matrices: Sequence[Tensor]) -> Tensor:
    """Side by side, behind some headroom, each padded to 8 bytes, so that the next can be viewed as any dtype."""
    first, padded = matrices[0], [-(-matrix.shape[1] // 8) * 8 for matrix in matrices]
    room = memory.with_headroom(len(first), sum(padded), first.device)
    places = memory.behind_headroom(room).split(padded, dim=1)
    for place, matrix in zip(places, matrices, strict=True):
        place[:, : matrix.shape[1]] = matrix
        place[:, matrix.shape[1] :] = 0
    return room
