"""N ranks in one process, in lock step: exchanges are tested at any world size without a process group.

Ranks that ask for different things raise ``DesyncError`` here; on a real network they would hang or corrupt each other.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.core import AllGather, AllReduce, AllToAll, Broadcast, DesyncError, Reply, Request
from thinwire.core.request import Partition, alone

T = TypeVar("T")
Asked = Request | tuple[Request, ...]


def simulate(exchanges: Sequence[Generator[Asked, Any, T]], *, sent: list[int] | None = None) -> list[T]:
    """Run one exchange per rank to the end and return what each returned.

    Args:
        exchanges: the coroutines, in rank order.
        sent: if given, the bytes that each rank sent are added to it (one entry per rank).
    """
    asked: list[Asked | None] = [None] * len(exchanges)
    results: list[T | None] = [None] * len(exchanges)
    replies: list[Any] = [None] * len(exchanges)
    while True:
        for rank, exchange in enumerate(exchanges):
            try:
                asked[rank] = exchange.send(replies[rank])
            except StopIteration as stop:
                asked[rank], results[rank] = None, stop.value
        if all(one is None for one in asked):
            return results  # type: ignore[return-value]
        _check_alike([_describe(one) for one in asked])
        if sent is not None:
            _count(asked, sent)
        replies = _answer_batches(asked)


def _answer_batches(asked: Sequence[Any]) -> list[Any]:
    if not isinstance(asked[0], tuple):
        return answer(asked)
    answered = [answer(requests) for requests in zip(*asked, strict=True)]
    return [tuple(reply[rank] for reply in answered) for rank in range(len(asked))]


def answer(requests: Sequence[Request]) -> list[Reply]:
    """What each rank gets for these requests (one per rank, all alike)."""
    _check_alike([request.signature for request in requests])
    partition = requests[0].partition
    if partition is not None:
        return _answer_in_parts(requests, partition)
    match requests[0]:
        case AllReduce(op=op):
            return [_reduce([r.tensor for r in requests], op) for _ in requests]  # type: ignore[union-attr]
        case AllGather():
            return [[r.message.clone() for r in requests] for _ in requests]  # type: ignore[union-attr]
        case AllToAll():
            return [torch.stack([r.messages[rank] for r in requests]) for rank in range(len(requests))]  # type: ignore[union-attr]
        case Broadcast(source=source):
            return [requests[source].tensor.clone() for _ in requests]  # type: ignore[union-attr]


def _answer_in_parts(requests: Sequence[Request], partition: Partition) -> list[Reply]:
    replies: dict[int, Reply] = {}
    for members in partition.members:
        asked = [replace(requests[rank], partition=None) for rank in members]
        answers = [alone(asked[0])] if len(members) == 1 else answer(asked)
        replies.update(zip(members, answers, strict=True))
    return [replies[rank] for rank in range(len(requests))]


def _reduce(tensors: list[Tensor], op: str) -> Tensor:
    """In rank order, so that every rank rounds alike."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if op in ("mean", "sum"):
            total += tensor
        else:
            total = torch.maximum(total, tensor) if op == "max" else torch.minimum(total, tensor)
    return total / len(tensors) if op == "mean" else total


def _describe(asked: Asked | None) -> object:
    if asked is None:
        return "nothing (its exchange has ended)"
    return tuple(one.signature for one in asked) if isinstance(asked, tuple) else asked.signature


def _check_alike(described: Sequence[object]) -> None:
    for rank, one in enumerate(described):
        if one != described[0]:
            raise DesyncError("request", rank=rank, got=one, expected=described[0])


def _count(asked: Sequence[Any], sent: list[int]) -> None:
    world_size = len(asked)
    for rank, one in enumerate(asked):
        requests = one if isinstance(one, tuple) else (one,)
        sent[rank] += sum(request.sent_bytes(world_size) for request in requests)
