"""Transports around a transport: they delay and break, say what was sent, and hand on everything else."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sim.threads import ThreadedWorld
from thinwire.comm import Delayed, Faulty, Framed, Link, Rounds, Tag, Throttled, Transport
from thinwire.comm.framing import HEADER_BYTES
from thinwire.comm.simulate import answer
from thinwire.comm.transport import Later
from thinwire.core import AllGather, AllReduce, Broadcast, Request, TransportError


def _alone() -> ThreadedWorld:
    return ThreadedWorld(1)


class _Two:
    """One of two; the other one asks for the same."""

    rank, world_size, lanes = 0, 2, 1

    def start(self, request: Request, tag: Tag) -> Later:
        return Later(lambda: answer([request, request])[0], request.sent_bytes(2))


REQUESTS = (AllReduce(torch.ones(10)), AllGather(torch.zeros(7, dtype=torch.uint8)), Broadcast(torch.ones(4)))


@pytest.mark.parametrize(
    ("wrap", "added"),
    [
        (lambda inner: inner, 0),
        (lambda inner: Throttled(inner, 1e12), 0),
        (lambda inner: Delayed(inner, lambda tag: 0.0), 0),
        (lambda inner: Faulty(inner, fail_at=[7]), 0),
        (lambda inner: Framed(inner), HEADER_BYTES),
    ],
)
def test_what_was_sent_is_said_by_every_transport(wrap: Callable[[Transport], Transport], added: int) -> None:
    transport = wrap(_Two())
    pending = [transport.start(request, Tag()) for request in REQUESTS]
    for one in pending:
        one.wait()
    assert [one.sent_bytes for one in pending] == [40, 7 + added, 8], "only gathered messages have headers"
    assert (transport.rank, transport.world_size, transport.lanes) == (0, 2, 1)


def test_a_link_adds_up_what_barriers_and_measurements_send() -> None:
    def asking() -> Rounds:
        yield REQUESTS[:2]
        yield REQUESTS[2:]

    link = Link(_Two())
    link.run(asking())
    assert link.sent_bytes == 40 + 7 + HEADER_BYTES + 8
    with link.idle() as transport:
        transport.start(REQUESTS[1], Tag()).wait()
    assert link.sent_bytes == 40 + 7 + HEADER_BYTES + 8 + 7, "measurements carry no headers"
    link.close()


def test_throttled_messages_queue_for_the_link() -> None:
    """Two messages of 0.05 s each and 0.02 s latency: lower bounds only, a busy machine may take longer."""
    throttled = Throttled(_Two(), bits_per_s=8 * 1000, latency_s=0.02)
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
