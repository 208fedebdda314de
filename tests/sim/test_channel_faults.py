"""A network that fails in the middle: every rank ends with an error or a commit, states are never half, nothing hangs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from sim.channels import TENSORS, exchange, fill, link_of, make_channel, noise, states_of
from sim.threads import ThreadedWorld, link_threads, run_ranks
from thinwire.comm import Faulty, Link, Pending, Tag, Transport
from thinwire.comm.transport import Later
from thinwire.core import DesyncError, Reply, Request, ThinwireError, TransportError
from thinwire.exchange import Channel, Fixed
from thinwire.exchange.flags import Flags

COMPRESSORS = ("dense", "int4", "topk(density=0.2)", "powersgd(rank=1)")
WHEN = ("start", "wait")


class BreaksAt:
    """Fails the message of one number among those of one step, when it is started or when its reply is waited for."""

    def __init__(self, inner: Transport, step: int, number: int, when: str) -> None:
        self.inner, self.rank, self.world_size, self.lanes = inner, inner.rank, inner.world_size, inner.lanes
        self._step, self._number, self._when = step, number, when
        self._lock = threading.Lock()
        self.seen = 0

    def start(self, request: Request, tag: Tag) -> Pending:
        with self._lock:  # lanes have threads of their own
            breaks = tag.step == self._step and self.seen == self._number
            self.seen += tag.step == self._step
        if breaks and self._when == "start":
            raise TransportError(f"injected in {tag}")
        pending = self.inner.start(request, tag)

        def reply() -> Reply:
            got = pending.wait()
            if breaks:
                raise TransportError(f"injected in {tag}")
            return got

        return Later(reply, pending.sent_bytes)


Result = tuple[bool, BaseException | None, dict[str, Any]]


def _two_steps(compressor: str, lanes: int, number: int, when: str) -> tuple[list[Result], int]:
    """A good transaction, then one in which a message of rank 1 breaks; how each rank ends, and messages of rank 1."""
    world = ThreadedWorld(2, lanes)
    counted: list[int] = []

    def work(rank: int) -> Result:
        broken: list[BreaksAt] = []

        def wrap(transport: Transport) -> Transport:
            broken.append(BreaksAt(transport, 1, number if rank == 1 else -1, when))
            return broken[0]

        with link_of(world, rank, wrap) as link:
            channel = make_channel(link, compressor)
            assert exchange(channel, rank, make=noise).committed
            before = states_of(channel)
            transaction = channel.begin()
            fill(transaction, channel, rank, noise)
            transaction.close()
            try:
                committed, error = transaction.wait().committed, None
            except ThinwireError as failed:
                committed, error = False, failed
                world.hang_up()
            if rank == 1:
                counted.append(broken[0].seen)
            assert link.open == 0, "it is over, well or not"
            after = states_of(channel)
            assert committed or after == before
            if error is not None:
                _assert_stays_broken(channel, rank, before, error)
            return committed, error, after

    return run_ranks(work, 2), counted[0]


def _assert_stays_broken(channel: Channel, rank: int, before: Mapping[str, Any], error: BaseException) -> None:
    transaction = channel.begin()
    fill(transaction, channel, rank, noise)
    transaction.close()
    with pytest.raises(type(error)) as again:
        transaction.wait()
    assert again.value is error, "the first error is the one that says what happened"
    assert states_of(channel) == before


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_a_failure_at_each_message(compressor: str, lanes: int) -> None:
    clean, messages = _two_steps(compressor, lanes, -1, "start")
    assert all(committed for committed, _, _ in clean)
    assert messages >= len(TENSORS)
    for number in range(messages):
        for when in WHEN:
            results, _ = _two_steps(compressor, lanes, number, when)
            committed, error, _ = results[1]
            assert not committed, f"message {number} of {messages}, {when}"
            assert isinstance(error, TransportError)
            assert "injected" in str(error)
            committed, error, after = results[0]
            assert committed or isinstance(error, TransportError)
            # Where a reply was lost, everything may have left before: the other rank then has all of it.
            assert not committed or (when == "wait" and after == clean[0][2]), "a commit is the whole commit"
    assert not link_threads()


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_corrupt_message_ends_all_ranks(lanes: int) -> None:
    world = ThreadedWorld(2, lanes)

    def work(rank: int) -> None:
        with link_of(world, rank, lambda t: Faulty(t, corrupt_at=[1] if rank == 1 else [])) as link:
            channel = make_channel(link, "topk(density=0.2)")
            exchange(channel, rank, make=noise)
            before = states_of(channel)
            with pytest.raises(DesyncError, match=r"rank 1 .* checksum"):
                exchange(channel, rank, make=noise)
            assert states_of(channel) == before

    run_ranks(work, 2)


def test_every_open_transaction_of_a_link_hears_of_its_failure_and_other_links_go_on() -> None:
    shared, other = ThreadedWorld(2), ThreadedWorld(2)

    def work(rank: int) -> None:
        breaks = BreakingChannel("two") if rank == 1 else BreakingChannel("")
        with link_of(shared, rank, breaks) as link, link_of(other, rank) as free:
            channels = [make_channel(link, name=name) for name in ("one", "two")]
            apart = make_channel(free, name="three")
            transactions = [channel.begin() for channel in (*channels, apart)]
            for transaction, channel in zip(transactions, (*channels, apart), strict=True):
                transaction.add("a", noise(TENSORS[0], rank, 0))
                assert transaction.names == channel.tensors.keys()
            for transaction in transactions:
                transaction.close()
            # The first may have ended before the second failed: it then has its means, on both ranks or on one.
            for transaction in transactions[1:2]:
                with pytest.raises(TransportError):
                    transaction.wait()
                shared.hang_up()
            with suppress(TransportError):
                transactions[0].wait()
            assert transactions[2].wait().committed
            assert (link.open, free.open) == (0, 0)

    run_ranks(work, 2)


class BreakingChannel:
    """Makes a transport that fails all messages of one channel."""

    def __init__(self, name: str) -> None:
        with link_of(ThreadedWorld(1), 0) as link:
            self._number = make_channel(link, name=name).number if name else -1

    def __call__(self, inner: Transport) -> Transport:
        number = self._number

        class Breaking:
            rank, world_size, lanes = inner.rank, inner.world_size, inner.lanes

            def start(self, request: Request, tag: Tag) -> Pending:
                if tag.channel == number:
                    raise TransportError("injected")
                return inner.start(request, tag)

        return Breaking()


def test_a_failure_before_anything_has_left_does_not_hang() -> None:
    """Isolated transactions begin with a barrier: where that fails, wait() says so."""
    with link_of(ThreadedWorld(1), 0, lambda t: Faulty(t, fail_at=[0])) as link:
        channel = make_channel(link)
        channel.measure(isolated=True)
        transaction = channel.begin()
        fill(transaction, channel, 0)
        transaction.close()
        with pytest.raises(TransportError, match="injected"):
            transaction.wait()
        assert link.open == 0


class Replaced:
    """Members that change: a failed transaction is dropped, and the next one gets the next link."""

    def __init__(self, *links: Link) -> None:
        self._links = list(links)
        self.errors: list[BaseException] = []

    def link(self) -> Link:
        return self._links[0]

    def settle(self, flags: Flags, mine: Mapping[str, float], error: BaseException | None) -> Flags:
        if error is None:
            return flags
        self.errors.append(error)
        self._links.pop(0)
        return Flags(ok=False)


@pytest.mark.parametrize("compressor", ["dense", "int4", "topk(density=0.2)"])
def test_members_may_go_on_over_another_link_with_fewer_ranks(compressor: str) -> None:
    """Three ranks, the last one dies, the other two go on from their states."""
    three, two = ThreadedWorld(3), ThreadedWorld(2, lanes=2)

    def work(rank: int) -> list[Any]:
        def wrap(transport: Transport) -> Transport:
            return BreaksAt(transport, 1, 2 if rank == 2 else -1, "start")

        with link_of(three, rank, wrap) as before:
            if rank == 2:
                channel = make_channel(Fixed(before), compressor, scalars=["n"])
                exchange(channel, rank, make=noise)
                with pytest.raises(TransportError):
                    exchange(channel, rank, make=noise)
                three.hang_up()
                return []
            with link_of(two, rank) as after:
                members = Replaced(before, after)
                channel = make_channel(members, compressor, scalars=["n"])
                exchange(channel, rank, make=noise)
                states = states_of(channel)
                dropped = exchange(channel, rank, make=noise)
                assert not dropped.committed
                assert dropped.error is members.errors[0]
                assert states_of(channel) == states
                outcome = exchange(channel, rank, make=noise, scalars={"n": 1.0 + rank})
                assert outcome.committed
                assert outcome.scalars == {"n": [1.0, 2.0]}, "by rank of the new link"
                assert (before.open, after.open) == (0, 0)
                assert after.rounds_in_lanes is (compressor == "int4")
                return [outcome.means[tensor.fqn].flatten().tolist() for tensor in TENSORS]

    first, second, _ = run_ranks(work, 3)
    assert first == second
