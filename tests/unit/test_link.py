"""A link: order, overlap, errors, completion per owner, and the end of its threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sim.threads import ThreadedWorld, link_threads
from thinwire.comm import Job, Link, Rounds, Tag, fit_lanes
from thinwire.comm.transport import Later
from thinwire.core import AllReduce, ConfigError, DesyncError, Request, TransportError

WAIT_S = 10.0


class Owner:
    """Submits jobs and keeps what became of each."""

    def __init__(self, link: Link, step: int = 0, channel: int = 1) -> None:
        self.link, self.step, self.channel = link, step, channel
        self.results: list[Any] = []
        self.errors: list[BaseException | None] = []
        self.jobs: list[Job] = []
        self._ended = threading.Semaphore(0)

    def submit(self, exchange: Rounds, *, last: bool = False, group: int | None = None) -> None:
        """The groups of an owner are numbered in the order of submission."""
        number = len(self.jobs) if group is None else group
        self.jobs.append(Job(exchange, Tag(self.step, number, channel=self.channel), self, last=last))
        self.link.submit(self.jobs[-1])

    def submit_all(self, *exchanges: Rounds) -> None:
        for exchange in exchanges:
            self.submit(exchange, last=exchange is exchanges[-1])

    def finished(self, job: Job, result: Any, error: BaseException | None) -> None:
        self.results.append(result)
        self.errors.append(error)
        self._ended.release()

    def wait(self) -> list[Any]:
        """The results, in the order in which the jobs ended; raises the first error."""
        for _ in self.jobs:
            assert self._ended.acquire(timeout=WAIT_S), "a job has not ended"
        assert len(self.results) == len(self.jobs), "every job ends once"
        for error in self.errors:
            if error is not None:
                raise error
        return self.results


@pytest.fixture
def order() -> list[Tag]:
    return []


@pytest.fixture
def link(order: list[Tag]) -> Iterator[Link]:
    link = Link(ThreadedWorld(1).transport(0, order), name="test")
    yield link
    link.close()
    assert not link_threads()


def rounds(count: int, value: float = 1.0) -> Rounds:
    got = []
    for _ in range(count):
        (reply,) = yield (AllReduce(torch.full((1,), value)),)
        got.append(float(reply))
    return got


def places(order: list[Tag]) -> list[tuple[int, int]]:
    return [(tag.group, tag.round) for tag in order]


def test_threads_are_named_after_what_they_do() -> None:
    one, two = (Link(ThreadedWorld(1, lanes).transport(0), name=f"n{lanes}") for lanes in (1, 2))
    assert {thread.name for thread in link_threads() if thread.name.startswith("thinwire-n")} == {
        "thinwire-n1-encode",
        "thinwire-n2-encode",
        "thinwire-n2-reply0",
        "thinwire-n2-reply1",
    }
    one.close()
    two.close()
    assert not link_threads()


def test_results_reach_the_owner(link: Link) -> None:
    owner = Owner(link)
    owner.submit_all(rounds(2, 3.0))
    assert owner.wait() == [[3.0, 3.0]]


def test_messages_start_as_a_wavefront(link: Link, order: list[Tag]) -> None:
    """A new group starts first, then the older ones go on, the oldest first."""
    owner = Owner(link, step=7)
    owner.submit_all(*(rounds(count) for count in (3, 1, 2)))
    owner.wait()
    assert places(order) == [(0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (2, 1)]
    assert {(tag.step, tag.channel) for tag in order} == {(7, 1)}


class HeldBack:
    """Gives one reply only once another message has been started."""

    rank, world_size = 0, 1

    def __init__(self, held: Tag, until: Tag, lanes: int = 1) -> None:
        self.lanes = lanes
        self._held, self._until, self._started = held, until, threading.Event()

    def start(self, request: Request, tag: Tag) -> Later:
        if tag == self._until:
            self._started.set()

        def reply() -> torch.Tensor:
            if tag == self._held:
                assert self._started.wait(5), f"{self._until} was kept back by {self._held}"
            assert isinstance(request, AllReduce)
            return request.tensor

        return Later(reply)


def test_a_last_reply_keeps_no_group_back() -> None:
    link = Link(HeldBack(held=Tag(1, 0, channel=1), until=Tag(1, 2, channel=1)))
    owners = [Owner(link, step) for step in range(2)]
    for owner in owners:
        owner.submit_all(rounds(1), rounds(1), rounds(1))
        assert owner.wait() == [[1.0]] * 3
    link.close()


def test_how_many_rounds_a_group_took_is_known_by_channel(link: Link, order: list[Tag]) -> None:
    """A group of the same number in another channel says nothing: its second round must not wait for the end."""
    for channel, count in ((1, 1), (2, 2)):
        owner = Owner(link, channel=channel)
        owner.submit_all(rounds(count))
        owner.wait()
    order.clear()
    owner = Owner(link, step=1, channel=2)
    owner.submit_all(rounds(2), rounds(1))
    owner.wait()
    assert places(order) == [(0, 0), (1, 0), (0, 1)]
    order.clear()
    owner = Owner(link, step=1, channel=1)
    owner.submit_all(rounds(2), rounds(1), rounds(1))
    owner.wait()
    assert places(order) == [(0, 0), (1, 0), (2, 0), (0, 1)], "it took one round before, so nobody waits for its reply"


@pytest.mark.parametrize(
    ("rounds", "lanes", "fit"),
    [
        ([1, 1], 2, False),
        ([2, 1], 2, True),
        ([2, 2], 1, False),
        ([3, 1], 2, False),
        ([2, None], 2, False),
        ([], 2, False),
        ([0, 2], 2, True),
    ],
)
def test_which_exchanges_travel_in_lanes(rounds: list[int | None], lanes: int, fit: bool) -> None:
    assert fit_lanes(rounds, lanes) is fit


def test_one_mode_holds_for_all_channels_of_a_link() -> None:
    link = Link(ThreadedWorld(1, lanes=2).transport(0))
    modes = []
    for channel, declared in ((1, [1, 1]), (2, [2]), (3, [None]), (3, [1])):
        link.declare(channel, declared)
        modes.append(link.rounds_in_lanes)
    assert modes == [False, True, False, True]
    link.open = 1
    link.declare(1, [2])
    with pytest.raises(ConfigError, match="only while it is idle"):
        link.declare(1, [3])
    link.declare(3, [2])
    assert link.rounds_in_lanes, "what was refused must not count later"
    with pytest.raises(AssertionError, match="open transaction"), link.idle():
        pass
    link.close()


@pytest.fixture
def in_lanes() -> Iterator[Link]:
    link = Link(HeldBack(held=Tag(0, 1, 0, channel=1), until=Tag(0, 0, 1, channel=1), lanes=2))
    link.declare(1, [2])
    assert link.rounds_in_lanes
    yield link
    link.close()
    assert not link_threads()


def test_in_lanes_rounds_do_not_wait_for_each_other(in_lanes: Link) -> None:
    owner = Owner(in_lanes)
    owner.submit_all(*(rounds(count, float(group)) for group, count in enumerate((2, 2, 1))))
    assert sorted(owner.wait()) == [[0.0, 0.0], [1.0, 1.0], [2.0]]


def test_more_rounds_than_were_declared_are_an_error_not_a_hang(in_lanes: Link) -> None:
    owner, later = Owner(in_lanes), Owner(in_lanes, step=1)
    owner.submit_all(rounds(3))
    with pytest.raises(AssertionError, match="more rounds than were declared"):
        owner.wait()
    later.submit_all(rounds(1))
    with pytest.raises(AssertionError, match="more rounds"):
        later.wait()


@pytest.mark.parametrize("counts", [(1, 3), (3, 1), (2, 2)])
def test_other_rounds_than_in_the_step_before_are_run_to_their_end(link: Link, counts: tuple[int, ...]) -> None:
    for step, count in enumerate(counts):
        owner = Owner(link, step)
        owner.submit_all(*(rounds(count, float(group)) for group in range(3)))
        assert sorted(owner.wait()) == [[float(group)] * count for group in range(3)]


def test_owners_end_independently(link: Link, order: list[Tag]) -> None:
    """The last job of one owner runs its own jobs to their end, and nobody else's."""
    long, short = Owner(link, channel=1), Owner(link, channel=2)
    long.submit(rounds(4, 1.0))
    short.submit_all(rounds(2, 2.0), rounds(3, 3.0))
    assert short.wait() == [[2.0, 2.0], [3.0, 3.0, 3.0]]
    assert long.results == [], "it has not submitted its last job"
    started = [tag.round for tag in order if tag.channel == 1]
    assert started == [0, 1, 2], "each submission lets older jobs go on by one round, draining does not"
    long.submit(rounds(1, 5.0), last=True)
    assert sorted(long.wait()) == [[1.0] * 4, [5.0]]


def test_an_exchange_without_rounds(link: Link) -> None:
    owner = Owner(link)
    owner.submit_all(rounds(0))
    assert owner.wait() == [[]]


def failing(error: Exception, after: int) -> Rounds:
    yield from rounds(after)
    raise error


@pytest.mark.parametrize("error", [DesyncError("step", rank=1, got=2, expected=3), ValueError("a bug")])
@pytest.mark.parametrize("after", [0, 1])
def test_the_first_error_reaches_every_owner_and_nothing_more_is_sent(
    link: Link, order: list[Tag], error: Exception, after: int
) -> None:
    waiting, bad, later = (Owner(link, channel=channel) for channel in (1, 2, 3))
    waiting.submit(rounds(5))
    bad.submit_all(failing(error, after))
    waiting.submit(rounds(1), last=True)
    later.submit_all(rounds(1), failing(KeyError("a second error"), 0))
    for owner in (waiting, bad, later):
        with pytest.raises(type(error)) as caught:
            owner.wait()
        assert caught.value is error
        assert set(owner.errors) == {error}
    assert [tag for tag in order if tag.channel == 3] == []
    # Before its failure each submission and each round of draining moves the older job on by one round.
    assert len([tag for tag in order if tag.channel == 2]) == after
    assert len([tag for tag in order if tag.channel == 1]) <= 1 + after
    with pytest.raises(type(error)):
        link.run(rounds(1))


class FailsTwice:
    """Starting group 1 fails while group 0 waits for its reply, which then fails too."""

    rank, world_size, lanes = 0, 1, 2

    def __init__(self) -> None:
        self.errors = [TransportError("the first"), TransportError("the second")]
        self._waiting, self._failed = threading.Event(), threading.Event()

    def start(self, request: Request, tag: Tag) -> Later:
        if tag.group == 1:
            assert self._waiting.wait(WAIT_S)
            self._failed.set()
            raise self.errors[0]

        def reply() -> Any:
            self._waiting.set()
            assert self._failed.wait(WAIT_S)
            time.sleep(0.01)  # the encode thread says first that it has failed
            raise self.errors[1]

        return Later(reply)


def test_the_first_of_two_errors_is_what_everybody_hears() -> None:
    transport = FailsTwice()
    link = Link(transport)
    link.declare(1, [2])
    owner, later = Owner(link), Owner(link, step=1)
    owner.submit_all(rounds(2), rounds(2))
    later.submit_all(rounds(1))
    for one in (owner, later):
        with pytest.raises(TransportError, match="the first"):
            one.wait()
        assert set(one.errors) == {transport.errors[0]}
    link.close()


@pytest.mark.parametrize("lanes", [1, 2])
def test_generators_are_closed_on_failure(lanes: int) -> None:
    """They hold the buffers of collectives, and owners drop theirs as soon as they hear of the failure."""
    link = Link(ThreadedWorld(1, lanes).transport(0))
    link.declare(1, [lanes])
    closed: list[str] = []

    def holding() -> Rounds:
        try:
            return (yield from rounds(2))
        finally:
            closed.append("closed")

    owner = Owner(link)
    owner.submit(failing(ValueError("a bug"), 0))
    owner.submit(holding(), last=True)
    never_started = Owner(link)
    never_started.submit_all(rounds(1))
    for one in (owner, never_started):
        with pytest.raises(ValueError, match="a bug"):
            one.wait()
    assert closed == [], "it was never started, so there is nothing to close"
    link.close()

    link = Link(ThreadedWorld(1).transport(0))
    owner = Owner(link)
    owner.submit(holding())
    owner.submit(failing(ValueError("a bug"), 0), last=True)
    with pytest.raises(ValueError, match="a bug"):
        owner.wait()
    assert closed == ["closed"]
    link.close()


def test_an_error_at_the_end_of_an_exchange_is_reported(link: Link) -> None:
    owner = Owner(link)
    owner.submit_all(failing(KeyError("after its last round"), 1))
    with pytest.raises(KeyError):
        owner.wait()


def test_run_waits_for_one_exchange_and_counts_its_bytes() -> None:
    link = Link(ThreadedWorld(1).transport(0))
    assert link.run(rounds(3, 2.0)) == [2.0, 2.0, 2.0]
    with pytest.raises(KeyError):
        link.run(failing(KeyError("in it"), 1))
    link.close()


def test_close_finishes_what_is_under_way(order: list[Tag]) -> None:
    link = Link(ThreadedWorld(1).transport(0, order))
    owner = Owner(link)
    owner.submit_all(rounds(3))
    link.close()
    link.close()  # harmless
    assert owner.wait() == [[1.0, 1.0, 1.0]]
    with pytest.raises(AssertionError, match="closed"):
        link.submit(Job(rounds(1), Tag(), owner))


class Closing:
    """Notes that it was closed."""

    rank, world_size, lanes = 0, 1, 1

    def __init__(self, reply_after: threading.Event | None = None) -> None:
        self.closed = 0
        self._reply_after = reply_after

    def start(self, request: Request, tag: Tag) -> Later:
        def reply() -> torch.Tensor:
            assert isinstance(request, AllReduce)
            if self._reply_after is not None:
                assert self._reply_after.wait(WAIT_S)
            return request.tensor

        return Later(reply)

    def close(self) -> None:
        self.closed += 1


def test_the_transport_is_closed_after_the_threads() -> None:
    transport = Closing()
    link = Link(transport)
    link.run(rounds(1))
    link.close()
    assert transport.closed == 1
    assert not link_threads()


def test_a_transport_is_not_closed_under_a_thread_that_waits_in_it() -> None:
    release = threading.Event()
    transport = Closing(release)
    link = Link(transport)
    owner = Owner(link)
    owner.submit_all(rounds(1))
    began_s = time.monotonic()
    link.close(timeout_s=0.05)
    assert time.monotonic() - began_s < 5, "close must not wait for ever"
    assert transport.closed == 0
    release.set()
    owner.wait()
    link.close()
    assert transport.closed == 1


def test_seconds_and_spans_are_accounted(link: Link) -> None:
    def slow() -> Rounds:
        time.sleep(0.02)
        yield from rounds(1)
        time.sleep(0.02)

    owner = Owner(link)
    owner.submit_all(slow())
    owner.wait()
    (job,) = owner.jobs
    assert job.encode_s >= 0.02
    assert job.decode_s >= 0.02
    assert job.wire_s >= 0.0
    assert [span.activity for span in job.spans] == ["encode", "wire", "decode"]


def test_link_threads_build_no_graph(link: Link) -> None:
    weight = torch.ones(1, requires_grad=True)
    modes: list[bool] = []

    def uses_a_parameter() -> Rounds:
        modes.append((weight * 2).requires_grad)
        yield from rounds(1)
        modes.append((weight * 2).requires_grad)

    link.run(uses_a_parameter())
    assert modes == [False, False]
