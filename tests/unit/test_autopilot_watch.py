"""Predicted against observed: what is noticed, how soon, and what is not worth a measurement."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import pytest

from thinwire.autopilot.watch import DRIFT, SETTLE_STEPS, TRIAL_STEPS, WORST_DRIFT, Verdict, Watch


def verdicts(watch: Watch, steps_s: Iterable[float]) -> list[Verdict]:
    return [watch.add(step_s) for step_s in steps_s]


def test_steps_as_expected_are_fine() -> None:
    watch = Watch(1.0, inf)
    assert set(verdicts(watch, [1.1, 0.9, 1.0, 1.12] * 50)) == {"fine"}
    assert watch.observed_s == pytest.approx(1.05)


@pytest.mark.parametrize(("step_s", "verdict"), [(1.2, "fine"), (0.8, "fine"), (1.3, "measure"), (0.7, "measure")])
def test_predictions_may_be_inexact(step_s: float, verdict: Verdict) -> None:
    assert verdicts(Watch(1.0, inf), [step_s] * 60)[-1] == verdict


@pytest.mark.parametrize("step_s", [20.0, 1.2, 0.8])
def test_a_lasting_change_is_noticed_within_200_steps(step_s: float) -> None:
    watch = Watch(1.0, inf)
    verdicts(watch, [1.0] * 40)
    noticed = verdicts(watch, [step_s] * 200)
    assert "measure" in noticed
    assert noticed.index("measure") < 30


def test_a_hiccup_is_not_a_change() -> None:
    """An evaluation, a checkpoint, somebody else's job for a few steps."""
    watch = Watch(1.0, inf)
    assert set(verdicts(watch, ([1.0] * 12 + [9.0] * 5) * 10)) == {"fine"}


def test_the_first_steps_after_a_change_do_not_count() -> None:
    watch = Watch(1.0, 1.0)
    assert set(verdicts(watch, [50.0] * SETTLE_STEPS + [1.0] * 40)) == {"fine"}


@pytest.mark.parametrize(("step_s", "verdict"), [(1.02, "fine"), (1.05, "dense"), (3.0, "dense")])
def test_slower_than_dense_goes_back_to_dense(step_s: float, verdict: Verdict) -> None:
    watch = Watch(1.0, 1.0)
    assert verdicts(watch, [step_s] * (SETTLE_STEPS + TRIAL_STEPS))[-1] == verdict


def test_dense_is_compared_once() -> None:
    """Later the network may have changed, and dense with it."""
    watch = Watch(1.0, 1.5)
    verdicts(watch, [1.0] * (SETTLE_STEPS + TRIAL_STEPS))
    assert "dense" not in verdicts(watch, [9.0] * 100)


def test_measurements_that_change_nothing_become_rarer() -> None:
    watch = Watch(1.0, inf)
    assert watch.refitted(changed=True) == DRIFT
    assert watch.refitted(changed=False) == 2 * DRIFT
    patient = Watch(1.0, inf, drift=2 * DRIFT)
    assert set(verdicts(patient, [1.2] * 100)) == {"fine"}
    assert Watch(1.0, inf, drift=WORST_DRIFT).refitted(changed=False) == WORST_DRIFT
    assert "measure" in verdicts(Watch(1.0, inf, drift=WORST_DRIFT), [2.0] * 30)


def test_nothing_observed_is_as_expected() -> None:
    assert Watch(0.7, inf).observed_s == 0.7
