"""Several exchanges as one: the requests of each round become one message per kind.

A fusion group runs its units' exchanges side by side. What they ask for in the same round is merged: all reductions of the
same operator and dtype, all gathers, all scatters, as far as they address the same ranks. So a group costs one message per
kind and round, however many units it has, and units that need fewer rounds simply drop out. ``AnyOf``, a few flags on which
the ranks agree, rides along with whatever else is sent.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.core import AllGather, AllReduce, AllToAll, Broadcast, Reply, Request, memory
from thinwire.core.side_by_side import Asked, Asking, Round, side_by_side

Merged = Generator[tuple[Request, ...], Any, list[Any]]
MOST_COPIED_BYTES = 64 << 20  # flags travel with no longer reduction: where there is no room behind it, it is copied


@dataclass(frozen=True, eq=False)
class AnyOf:
    """Which of the ``flags`` (uint8, 0 or 1) are set on any rank; the reply is a bool tensor. Only within ``merge``.

    Args:
        room: fp32 memory of at least as many elements that may be overwritten. If it lies behind a tensor that is reduced
            in the same round, the flags travel with that without a copy.
    """

    flags: Tensor
    room: Tensor | None = None


def merge(exchanges: Sequence[Asking]) -> Merged:
    """Run ``exchanges`` side by side; yields one tuple of merged requests per round, returns their results in order."""
    return (yield from side_by_side(exchanges, _ask))


def _ask(asked: Asked) -> Round:
    """One round: merge by kind, ask, and hand every exchange its own part of the replies."""
    wanted = [(index, r) for index, one in asked.items() for r in (one if isinstance(one, tuple) else (one,))]
    requests = [(index, _carried(r, wanted) if isinstance(r, AnyOf) else r) for index, r in wanted]
    kinds: dict[object, list[int]] = {}
    for position, (_, request) in enumerate(requests):
        kinds.setdefault(_kind(request, position), []).append(position)
    batches = [[requests[position][1] for position in members] for members in kinds.values()]
    merged_replies = yield tuple(_join(batch) for batch in batches)
    parts: dict[int, Reply] = {}
    for members, batch, reply in zip(kinds.values(), batches, merged_replies, strict=True):
        parts.update(zip(members, _part(batch, reply), strict=True))
    for position, (_, request) in enumerate(wanted):
        if isinstance(request, AnyOf):
            parts[position] = _any_of(parts[position])
    return _by_exchange(asked, requests, parts)


def _carried(asked: AnyOf, wanted: Sequence[tuple[int, Request | AnyOf]]) -> Request:
    """Flags as part of what is sent anyway; all ranks decide alike, by kinds and sizes, wherever their memory lies."""
    flags, others = asked.flags, [r for _, r in wanted if not isinstance(r, AnyOf) and r.groups is None]
    if any(isinstance(r, AllGather) and not r.varying for r in others):
        return AllGather(flags)
    for other in others:
        if isinstance(other, AllToAll):
            return AllToAll(flags.expand(other.messages.shape[0], -1))
    sums = [r for r in others if isinstance(r, AllReduce) and r.op in ("mean", "sum") and r.tensor.is_floating_point()]
    if sums and sum(r.tensor.nbytes for r in sums) <= MOST_COPIED_BYTES:
        if asked.room is not None and sums[0].tensor.dtype is asked.room.dtype:
            return AllReduce(asked.room[: flags.numel()].copy_(flags), sums[0].op)
        return AllReduce(flags.to(sums[0].tensor.dtype), sums[0].op)
    return AllGather(flags)


def _any_of(reply: Reply) -> Tensor:
    """From one tensor if it was reduced, else from one of each rank."""
    if isinstance(reply, Tensor) and reply.dim() == 1:
        return reply > 0
    return torch.stack(list(reply)).amax(dim=0) > 0


def _by_exchange(asked: Asked, requests: list[tuple[int, Request]], parts: dict[int, Reply]) -> dict[int, Any]:
    replies: dict[int, list[Reply]] = {index: [] for index in asked}
    for position, (index, _) in enumerate(requests):
        replies[index].append(parts[position])
    return {index: tuple(got) if isinstance(asked[index], tuple) else got[0] for index, got in replies.items()}


def _kind(request: Request, position: int) -> object:
    """Requests of equal kind travel together. What cannot be merged is its own kind."""
    match request:
        case AllReduce():
            return ("all_reduce", request.op, request.tensor.dtype, request.groups)
        case AllGather(varying=False):
            return ("all_gather", request.groups)
        case AllToAll():
            return ("all_to_all", request.groups)
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
            return replace(first, message=_aligned([r.message for r in batch]))  # type: ignore[union-attr]
        case AllToAll():
            return replace(first, messages=_aligned([r.messages for r in batch]))  # type: ignore[union-attr]
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
    rows = [row.split(padded) for row in reply]
    return [[row[member][:length] for row in rows] for member, length in enumerate(lengths)]


def _aligned(messages: Sequence[Tensor]) -> Tensor:
    """One behind the other along the last axis, each padded to 8 bytes, so that the next can be viewed as any dtype."""
    padded = [-(-message.shape[-1] // 8) * 8 for message in messages]
    first = messages[0]
    whole = memory.empty((*first.shape[:-1], sum(padded)), first.dtype, first.device)
    for place, message in zip(whole.split(padded, dim=-1), messages, strict=True):
        place[..., : message.shape[-1]] = message
        place[..., message.shape[-1] :] = 0
    return whole
