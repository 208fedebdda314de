"""What is taken for the time of a step, whatever else a loop does and whichever rank computes first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from thinwire.engine.step_clock import StepClock
from thinwire.plan.online import StepTimes


def clock(device: str = "cpu") -> StepClock:
    session: Any = SimpleNamespace(device=torch.device(device), meter=SimpleNamespace(last_ready_s={}))
    return StepClock(cast(Any, session))


def step(before_s: float, exchange_s: float) -> StepTimes:
    return StepTimes(before_s, {}, before_s + exchange_s)


@pytest.mark.parametrize(("before_s", "exchange_s"), [(0.1, 0.3), (0.15, 0.25), (0.05, 0.35)])
def test_ranks_that_compute_first_wait_longer_and_the_sum_is_the_same(before_s: float, exchange_s: float) -> None:
    assert clock().step_s(step(before_s, exchange_s), usual_s=0.1) == pytest.approx(0.4)


def test_an_evaluation_between_two_steps_does_not_count() -> None:
    assert clock().step_s(step(60.0, 0.3), usual_s=0.1) == pytest.approx(0.4)
    assert clock().usual_s([step(0.1, 0.3), step(60.0, 0.3), step(0.1, 0.3), step(0.1, 0.3)]) == pytest.approx(0.4)


def test_accelerators_tell_the_whole_step_only() -> None:
    assert clock("meta").step_s(step(60.0, 0.3), usual_s=0.0) == pytest.approx(60.3)


def test_a_step_without_gradients_has_a_time_too() -> None:
    times = clock().read()
    assert times.step_s == times.before_s >= 0
