"""The step simulator: bounds, sharing of cores, and the order of a real link."""

from __future__ import annotations

import threading
from collections.abc import Generator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.comm import Pending, Tag
from thinwire.comm.link import Job, Link
from thinwire.comm.transport import Later
from thinwire.core import AllGather, Request
from thinwire.plan import Cluster, GroupWork, Message, simulate_groups

SPARE = Cluster(world_size=4, cores=8)
SHARED = Cluster(world_size=4, ranks_per_machine=4, cores=2)
SECONDS = st.floats(min_value=0, max_value=1)


@st.composite
def works(draw: st.DrawFn) -> list[GroupWork]:
    groups, ready_s = [], 0.0
    for _ in range(draw(st.integers(min_value=1, max_value=5))):
        ready_s += draw(SECONDS)
        count = draw(st.integers(min_value=1, max_value=3))
        rounds = tuple((Message(draw(SECONDS), draw(SECONDS)),) for _ in range(count))
        groups.append(GroupWork(ready_s, tuple(draw(SECONDS) for _ in range(count + 1)), rounds))
    return groups


def test_one_group_is_a_sum() -> None:
    work = GroupWork(1.0, (0.1, 0.2, 0.3), ((Message(2.0),), (Message(3.0),)))
    done = simulate_groups([work], backward_s=1.5, cluster=SPARE)
    assert done.finish_s == pytest.approx(1.0 + 0.1 + 2.0 + 0.2 + 3.0 + 0.3)
    assert done.wait_s == pytest.approx(done.finish_s - 1.5)


def test_messages_overlap_with_backward() -> None:
    early = GroupWork(0.1, (0.0, 0.0), ((Message(1.0),),))
    assert simulate_groups([early], backward_s=2.0, cluster=SPARE).wait_s == 0.0


@pytest.mark.parametrize(("rested_s", "saved_s"), [(0.0, 0.1), (0.15, 0.25), (9.0, 0.3)])
def test_a_rested_wire_saves_a_burst(rested_s: float, saved_s: float) -> None:
    """At most 0.3 s; also the 0.1 s until the first message count as rest."""
    works = [GroupWork(0.1, (0.0, 0.0), ((Message(0.2),),)), GroupWork(0.1, (0.0, 0.0), ((Message(2.0),),))]
    done = simulate_groups(works, 0.1, SPARE, burst_s=0.3, rested_s=rested_s)
    assert done.finish_s == pytest.approx(2.3 - saved_s)


def test_a_wire_that_rests_between_messages_saves_up_again() -> None:
    works = [GroupWork(ready_s, (0.0, 0.0), ((Message(1.0),),)) for ready_s in (0.0, 2.0)]
    spans = simulate_groups(works, 2.0, SPARE, burst_s=0.3, rested_s=9.0).spans
    assert [span.seconds for span in spans if span.activity == "wire"] == pytest.approx([0.7, 0.7])


def test_a_millisecond_of_work_costs_two_where_four_ranks_share_two_cores() -> None:
    """The figure of docs/log.md."""
    work = GroupWork(0.1, (0.001, 0.0), ((Message(0.01),),))
    done = simulate_groups([work], backward_s=1.0, cluster=SHARED)
    assert done.finish_s == pytest.approx(1.0 + 0.002)
    messages = GroupWork(0.1, (0.0, 0.0), ((Message(0.01, cpu_s=0.001),),))
    assert simulate_groups([messages], backward_s=1.0, cluster=SHARED).finish_s == pytest.approx(1.0 + 0.002)


@given(works(), SECONDS)
def test_bounds(groups: list[GroupWork], rest_s: float) -> None:
    backward_s = groups[-1].ready_s + rest_s
    done = simulate_groups(groups, backward_s, SPARE)
    wire_s = sum(message.wire_s for group in groups for one in group.rounds for message in one)
    busy_s = sum(sum(group.stages_s) for group in groups)
    assert done.backward_s == backward_s
    assert done.finish_s >= backward_s
    assert done.finish_s >= groups[0].ready_s + wire_s - 1e-9
    assert done.finish_s >= busy_s - 1e-9
    assert done.finish_s <= backward_s + wire_s + busy_s + 1e-9


@given(works(), SECONDS)
def test_sharing_cores_never_helps(groups: list[GroupWork], rest_s: float) -> None:
    backward_s = groups[-1].ready_s + rest_s
    alone, shared = (simulate_groups(groups, backward_s, cluster) for cluster in (SPARE, SHARED))
    assert shared.finish_s >= alone.finish_s - 1e-9
    assert shared.backward_s >= alone.backward_s


@given(works(), SECONDS)
def test_one_wire_and_one_thread(groups: list[GroupWork], rest_s: float) -> None:
    done = simulate_groups(groups, groups[-1].ready_s + rest_s, SHARED)
    for activities in ({"wire"}, {"encode", "decode"}):
        spans = [span for span in done.spans if span.activity in activities]
        assert all(left.end_s <= right.start_s + 1e-9 for left, right in pairwise(spans))


class _Instant:
    rank, world_size, lanes = 0, 1, 1

    def start(self, request: Request, tag: Tag) -> Pending:
        return Later(lambda: [request.message])  # type: ignore[union-attr]


def _exchange(rounds: int) -> Generator[tuple[Request, ...], Any, None]:
    for _ in range(rounds):
        yield (AllGather(torch.zeros(1, dtype=torch.uint8)),)


class _Owner:
    """Collects jobs until all have ended."""

    def __init__(self, expected: int) -> None:
        self.jobs: list[Job] = []
        self.done = threading.Semaphore(0)
        self._expected = expected

    def finished(self, job: Job, result: Any, error: BaseException | None) -> None:
        assert error is None
        self.jobs.append(job)
        if len(self.jobs) == self._expected:
            self.done.release()


@pytest.mark.parametrize("rounds", [[1, 1, 1], [2, 2, 2], [3, 1, 2, 1], [1, 3, 3]])
def test_the_order_is_that_of_the_real_link(rounds: list[int]) -> None:
    link, owner = Link(_Instant(), name="test"), _Owner(len(rounds))
    for step in range(2):  # in the first one nobody knows yet which round is a group's last
        owner = _Owner(len(rounds))
        for group, count in enumerate(rounds):
            link.submit(Job(_exchange(count), Tag(step, group), owner, last=group == len(rounds) - 1))
        assert owner.done.acquire(timeout=10)
    link.close()
    spans = sorted((span for job in owner.jobs for span in job.spans), key=lambda span: span.start_s)
    coding = [(span.activity, span.group) for span in spans if span.activity != "wire"]
    groups = [GroupWork(0.0, (0.1,) * (count + 1), ((Message(0.1),),) * count) for count in rounds]
    done = simulate_groups(groups, 0.0, SPARE)
    assert [(span.activity, span.group) for span in done.spans if span.activity in ("encode", "decode")] == coding


def test_in_lanes_a_second_round_waits_for_no_other_group() -> None:
    """The second group is ready late; as a wavefront the first one's second round would wait for it."""
    groups = [GroupWork(ready_s, (0.0, 0.0, 0.0), ((Message(0.1),),) * 2) for ready_s in (0.0, 1.0)]
    messages = [
        [(span.group, round(span.start_s, 6)) for span in simulated.spans if span.activity == "wire"]
        for simulated in (simulate_groups(groups, 1.0, SPARE, in_lanes=in_lanes) for in_lanes in (False, True))
    ]
    assert messages == [[(0, 0.0), (1, 1.0), (0, 1.1), (1, 1.2)], [(0, 0.0), (0, 0.1), (1, 1.0), (1, 1.1)]]


@given(works(), SECONDS)
def test_lanes_keep_the_order_of_every_round(groups: list[GroupWork], rest_s: float) -> None:
    backward_s = groups[-1].ready_s + rest_s
    done = simulate_groups(groups, backward_s, SPARE, in_lanes=True)
    sent = [span for span in done.spans if span.activity == "wire"]
    wanted = [(group, message.sent_bytes) for group, one in enumerate(groups) for r in one.rounds for message in r]
    assert len(sent) == len(wanted)
    assert all(left.end_s <= right.start_s + 1e-9 for left, right in pairwise(sent)), "one wire"
    firsts = list(dict.fromkeys(span.group for span in done.spans if span.activity == "encode"))
    assert firsts == list(range(len(groups)))
    wire_s = sum(message.wire_s for group in groups for one in group.rounds for message in one)
    busy_s = sum(sum(group.stages_s) for group in groups)
    assert backward_s <= done.finish_s <= backward_s + wire_s + busy_s + 1e-9
