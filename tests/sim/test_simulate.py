"""The simulator finds ranks that ask for different things, and answers each request as a network would."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire.comm import simulate
from thinwire.core import AllGather, AllReduce, AllToAll, Broadcast, DesyncError, Request

Rank = Generator[Request | tuple[Request, ...], Any, Any]


def ask(*requests: Request | tuple[Request, ...]) -> Rank:
    """Asks for one thing after the other and returns the replies."""
    replies = []
    for request in requests:
        replies.append((yield request))
    return replies


@pytest.mark.parametrize(
    ("op", "expected"), [("mean", [2.0, 5.0]), ("sum", [4.0, 10.0]), ("max", [3.0, 9.0]), ("min", [1.0, 1.0])]
)
def test_all_reduce(op: Any, expected: list[float]) -> None:
    tensors = [torch.tensor([1.0, 9.0]), torch.tensor([3.0, 1.0])]
    for (reply,) in simulate([ask(AllReduce(tensor, op)) for tensor in tensors]):
        assert reply.tolist() == expected


def test_all_gather_keeps_rank_order_and_unequal_lengths() -> None:
    messages = [torch.arange(length, dtype=torch.uint8) for length in (3, 0, 5)]
    for (reply,) in simulate([ask(AllGather(message, varying=True)) for message in messages]):
        assert [one.tolist() for one in reply] == [message.tolist() for message in messages]


def test_all_to_all_transposes() -> None:
    rows = torch.arange(9, dtype=torch.uint8).view(3, 3, 1)
    replies = simulate([ask(AllToAll(rows[rank])) for rank in range(3)])
    assert [reply.view(-1).tolist() for (reply,) in replies] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_broadcast_and_batches() -> None:
    replies = simulate(
        [ask((Broadcast(torch.tensor([rank]), source=1), AllReduce(torch.ones(1)))) for rank in range(3)]
    )
    for (batch,) in replies:
        assert [part.tolist() for part in batch] == [[1], [1.0]]


def test_replies_of_different_ranks_share_no_memory() -> None:
    first, second = simulate([ask(AllReduce(torch.ones(2))) for _ in range(2)])
    first[0].zero_()
    assert second[0].tolist() == [1.0, 1.0]


def test_sent_bytes_are_counted_per_rank() -> None:
    sent = [0, 0]
    requests = (AllReduce(torch.ones(4)), AllGather(torch.zeros(10, dtype=torch.uint8)))
    simulate([ask(*requests) for _ in range(2)], sent=sent)
    assert sent == [16 + 10, 16 + 10]


def _bytes(length: int) -> Tensor:
    return torch.zeros(length, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        (AllReduce(torch.ones(3)), AllReduce(torch.ones(4))),
        (AllReduce(torch.ones(3)), AllReduce(torch.ones(3), "max")),
        (AllReduce(torch.ones(3)), AllReduce(torch.ones(3, dtype=torch.float16))),
        (AllReduce(torch.ones(3)), AllGather(_bytes(12))),
        (AllGather(_bytes(3)), AllGather(_bytes(4))),
        (AllGather(_bytes(3)), AllGather(_bytes(3), varying=True)),
        (AllToAll(_bytes(6).view(3, 2)), AllToAll(_bytes(9).view(3, 3))),
        (Broadcast(torch.ones(1), source=0), Broadcast(torch.ones(1), source=1)),
        (AllReduce(torch.ones(3)), (AllReduce(torch.ones(3)),)),
    ],
)
def test_mismatched_requests_name_the_rank(usual: Request, odd: Request | tuple[Request, ...]) -> None:
    with pytest.raises(DesyncError, match="rank 2 is out of step") as caught:
        simulate([ask(usual), ask(usual), ask(odd)])
    assert caught.value.rank == 2


def test_a_rank_that_ends_early_is_named() -> None:
    request = AllReduce(torch.ones(1))
    with pytest.raises(DesyncError, match=r"rank 1 .* has ended"):
        simulate([ask(request, request), ask(request), ask(request, request)])
