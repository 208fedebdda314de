"""What is taken for the time of a step, whatever else a loop does and whichever rank computes first."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from thinwire.autopilot.clock import StepClock
from thinwire.autopilot.expect import StepTimes
from thinwire.comm.trace import Trace
from thinwire.observe.report import StepReport


def clock(*, is_cpu: bool = True) -> StepClock:
    return StepClock(is_cpu=is_cpu)


def report(ready_s: Mapping[str, float], ended_s: float) -> StepReport:
    return StepReport(
        index=0,
        committed=True,
        trace=Trace(0, 0, ()),
        ready_s=ready_s,
        ended_s=ended_s,
        wait_s=0.0,
        encode_s=0.0,
        wire_s=0.0,
        decode_s=0.0,
        wire_bytes=0,
        dense_bytes=0,
    )


def step(before_s: float, exchange_s: float) -> StepTimes:
    return StepTimes(before_s, {}, before_s + exchange_s)


@pytest.mark.parametrize(("before_s", "exchange_s"), [(0.1, 0.3), (0.15, 0.25), (0.05, 0.35)])
def test_ranks_that_compute_first_wait_longer_and_the_sum_is_the_same(before_s: float, exchange_s: float) -> None:
    assert clock().step_s(step(before_s, exchange_s), usual_s=0.1) == pytest.approx(0.4)


def test_an_evaluation_between_two_steps_does_not_count() -> None:
    assert clock().step_s(step(60.0, 0.3), usual_s=0.1) == pytest.approx(0.4)
    assert clock().usual_s([step(0.1, 0.3), step(60.0, 0.3), step(0.1, 0.3), step(0.1, 0.3)]) == pytest.approx(0.4)


def test_accelerators_tell_the_whole_step_only() -> None:
    assert clock(is_cpu=False).step_s(step(60.0, 0.3), usual_s=0.0) == pytest.approx(60.3)


def test_a_step_without_gradients_has_a_time_too() -> None:
    times = clock().read(report({}, time.perf_counter()))
    assert times.step_s == times.before_s >= 0
    assert times.ready_s == {}


def test_a_step_begins_where_the_one_before_ended_without_the_pause_in_between() -> None:
    timed = clock()
    timed.resume(report({}, 10.0), pause_s=2.0)
    times = timed.read(report({"b": 13.5, "a": 13.0}, 15.0))
    assert times.before_s == pytest.approx(1.0)
    assert times.ready_s == {"a": pytest.approx(0.0), "b": pytest.approx(0.5)}
    assert times.step_s == pytest.approx(3.0)
    assert timed.read(report({"b": 13.5, "a": 13.0}, 15.0), gradients=False).ready_s == {}
