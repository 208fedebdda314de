"""Transports around a transport: they count, delay and break, and hand on everything else."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from sim.threads import ThreadedWorld
from thinwire.comm import Counting, Delayed, Faulty, Tag, Throttled
from thinwire.core import AllGather, AllReduce, Broadcast, TransportError


def _alone() -> ThreadedWorld:
    return ThreadedWorld(1)


class _Two:
    """Says that it is one of two, and answers with the request itself."""

    rank, world_size, lanes = 0, 2, 1

    def start(self, request: AllReduce | AllGather, tag: Tag):  # type: ignore[no-untyped-def]
        return _alone().transport(0).start(request, tag)


def test_counting_adds_up_what_requests_declare() -> None:
    counting = Counting(_Two())  # type: ignore[arg-type]
    counting.start(AllReduce(torch.ones(10)), Tag()).wait()
    counting.start(AllGather(torch.zeros(7, dtype=torch.uint8)), Tag()).wait()
    counting.start(Broadcast(torch.ones(4)), Tag()).wait()
    assert counting.sent_bytes == 40 + 7 + 8
    assert counting.messages == {"AllReduce": 1, "AllGather": 1, "Broadcast": 1}
    assert (counting.rank, counting.world_size) == (0, 2)


def test_throttled_messages_queue_for_the_link() -> None:
    """Two messages of 0.05 s each and 0.02 s latency: lower bounds only, a busy machine may take longer."""
    throttled = Throttled(_Two(), bits_per_s=8 * 1000, latency_s=0.02)  # type: ignore[arg-type]
    started_s = time.monotonic()
    first, second = (throttled.start(AllGather(torch.zeros(50, dtype=torch.uint8)), Tag()) for _ in range(2))
    assert time.monotonic() - started_s < 0.05, "starting a message must not wait for the link"
    first.wait()
    assert time.monotonic() - started_s >= 0.07
    second.wait()
    assert time.monotonic() - started_s >= 0.12


def test_delayed_waits_by_tag() -> None:
    delayed = Delayed(_alone().transport(0), lambda tag: 0.05 if tag.group == 1 else 0.0)
    started_s = time.monotonic()
    reply = delayed.start(AllReduce(torch.ones(1)), Tag(group=1)).wait()
    assert time.monotonic() - started_s >= 0.05
    assert isinstance(reply, Tensor)
    assert reply.tolist() == [1.0]


def test_faulty_fails_and_corrupts_where_told() -> None:
    message = torch.arange(4, dtype=torch.uint8)
    faulty = Faulty(_alone().transport(0), fail_at=[1], corrupt_at=[2])
    (intact,) = faulty.start(AllGather(message), Tag(0)).wait()
    assert intact.tolist() == [0, 1, 2, 3]
    with pytest.raises(TransportError, match="injected fault on rank 0 in step 1"):
        faulty.start(AllGather(message), Tag(1))
    (broken,) = faulty.start(AllGather(message), Tag(2)).wait()
    assert broken.tolist() == [0, 1, 2, 2]
    assert message.tolist() == [0, 1, 2, 3], "the sender's own data must not change"
