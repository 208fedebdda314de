"""The communication thread: order, overlap, errors, and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from sim.threads import ThreadedWorld
from thinwire.comm import Scheduler, Tag, Ticket, fit_lanes
from thinwire.comm.transport import Later
from thinwire.core import AllReduce, DesyncError, Request, TransportError

Rounds = Generator[tuple[Request, ...], Any, Any]


@pytest.fixture
def order() -> list[Tag]:
    return []


@pytest.fixture
def scheduler(order: list[Tag]) -> Iterator[Scheduler]:
    scheduler = Scheduler(ThreadedWorld(1).transport(0, order))
    yield scheduler
    scheduler.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "thinwire-comm"]


def rounds(count: int, value: float = 1.0) -> Rounds:
    got = []
    for _ in range(count):
        (reply,) = yield (AllReduce(torch.full((1,), value)),)
        got.append(float(reply))
    return got


def test_results_reach_done_and_the_ticket(scheduler: Scheduler) -> None:
    results: list[Any] = []
    ticket = scheduler.submit(lambda: rounds(2, 3.0), results.append, step=0, group=0)
    scheduler.flush().wait(5)
    ticket.wait(5)
    assert results == [[3.0, 3.0]]


def test_messages_start_as_a_wavefront(scheduler: Scheduler, order: list[Tag]) -> None:
    """A new group starts first, then the older ones go on, the oldest first."""
    for group, count in enumerate((3, 1, 2)):
        scheduler.submit(partial(rounds, count), lambda _: None, step=7, group=group)
    scheduler.flush().wait(5)
    assert [(tag.group, tag.round) for tag in order] == [(0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (2, 1)]
    assert {tag.step for tag in order} == {7}


class _HeldBack:
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
    scheduler = Scheduler(_HeldBack(held=Tag(1, 0), until=Tag(1, 2)))
    results: list[Any] = []
    for step in range(2):
        for group in range(3):
            scheduler.submit(partial(rounds, 1), results.append, step=step, group=group)
        scheduler.flush().wait(10)
    scheduler.close()
    assert results == [[1.0]] * 6


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


@pytest.fixture
def in_lanes() -> Iterator[Scheduler]:
    scheduler = Scheduler(_HeldBack(held=Tag(0, 1, 0), until=Tag(0, 0, 1), lanes=2))
    scheduler.in_lanes = True
    yield scheduler
    scheduler.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "thinwire-comm"]


def test_in_lanes_rounds_do_not_wait_for_each_other(in_lanes: Scheduler) -> None:
    results: list[Any] = []
    ended: list[str] = []
    for group, count in enumerate((2, 2, 1)):
        in_lanes.submit(partial(rounds, count, float(group)), results.append, step=0, group=group)
    in_lanes.flush(lambda: ended.append("flush")).wait(10)
    assert sorted(results) == [[0.0, 0.0], [1.0, 1.0], [2.0]]
    assert ended == ["flush"]


def test_more_rounds_than_were_declared_are_an_error_not_a_hang(in_lanes: Scheduler) -> None:
    ticket = in_lanes.submit(partial(rounds, 3), lambda _: None, step=0, group=0)
    with pytest.raises(AssertionError, match="more rounds than were declared"):
        in_lanes.flush().wait(10)
    with pytest.raises(AssertionError, match="more rounds"):
        ticket.wait(5)


@pytest.mark.parametrize("counts", [(1, 3), (3, 1), (2, 2)])
def test_other_rounds_than_in_the_step_before_are_run_to_their_end(
    scheduler: Scheduler, counts: tuple[int, ...]
) -> None:
    results: list[Any] = []
    for step, count in enumerate(counts):
        for group in range(3):
            scheduler.submit(partial(rounds, count, float(group)), results.append, step=step, group=group)
        scheduler.flush().wait(5)
    expected = [[float(group)] * count for count in counts for group in range(3)]
    assert sorted(results) == sorted(expected)


def test_flush_ends_what_was_submitted_before_it(scheduler: Scheduler) -> None:
    ended: list[str] = []
    scheduler.submit(lambda: rounds(4), lambda _: ended.append("group"), step=0, group=0)
    scheduler.flush(lambda: ended.append("flush")).wait(5)
    assert ended == ["group", "flush"]


def test_an_exchange_without_rounds(scheduler: Scheduler) -> None:
    results: list[Any] = []
    scheduler.submit(lambda: rounds(0), results.append, step=0, group=0)
    scheduler.flush().wait(5)
    assert results == [[]]


def _failing(error: Exception, after: int) -> Rounds:
    yield from rounds(after)
    raise error


@pytest.mark.parametrize("error", [DesyncError("step", rank=1, got=2, expected=3), ValueError("a bug")])
@pytest.mark.parametrize("after", [0, 1])
def test_errors_reach_everybody_who_waits_and_nothing_more_is_sent(
    scheduler: Scheduler, order: list[Tag], error: Exception, after: int
) -> None:
    bad = scheduler.submit(lambda: _failing(error, after), lambda _: None, step=0, group=0)
    scheduler.flush(lambda: pytest.fail("a step that failed must not be closed"))
    later = scheduler.submit(lambda: rounds(1), lambda _: None, step=1, group=0)
    flush = scheduler.flush()
    for ticket in (bad, later, flush):
        with pytest.raises(type(error)) as caught:
            ticket.wait(5)
        assert caught.value is error
    assert len(order) == after


def test_an_error_in_done_is_reported(scheduler: Scheduler) -> None:
    def done(_: Any) -> None:
        raise KeyError("in done")

    ticket = scheduler.submit(lambda: rounds(1), done, step=0, group=0)
    with pytest.raises(KeyError):
        scheduler.flush().wait(5)
    with pytest.raises(KeyError):
        ticket.wait(5)


def test_an_error_at_the_end_of_a_step_is_reported(scheduler: Scheduler) -> None:
    def done() -> None:
        raise KeyError("in flush")

    with pytest.raises(KeyError):
        scheduler.flush(done).wait(5)


def test_close_finishes_what_is_under_way(order: list[Tag]) -> None:
    scheduler = Scheduler(ThreadedWorld(1).transport(0, order))
    results: list[Any] = []
    scheduler.submit(lambda: rounds(3), results.append, step=0, group=0)
    scheduler.close()
    scheduler.close()  # harmless
    assert results == [[1.0, 1.0, 1.0]]


def test_seconds_are_accounted(scheduler: Scheduler) -> None:
    def slow() -> Rounds:
        time.sleep(0.02)
        return (yield from rounds(1))

    scheduler.submit(slow, lambda _: time.sleep(0.02), step=0, group=0)
    scheduler.flush().wait(5)
    assert scheduler.seconds.encode_s >= 0.0
    assert scheduler.seconds.decode_s >= 0.02


def test_tickets_call_back_early_and_late() -> None:
    for late in (False, True):
        ticket, heard = Ticket(), list[BaseException | None]()
        if late:
            ticket.finish()
        ticket.then(heard.append)
        if not late:
            assert heard == []
            ticket.finish()
        assert heard == [None]
        ticket.wait(1)


def test_a_ticket_that_nobody_finishes_times_out() -> None:
    with pytest.raises(TransportError, match="no answer"):
        Ticket().wait(0.01)
