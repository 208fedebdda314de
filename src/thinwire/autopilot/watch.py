"""Predicted against observed step time: when steps drift from the plan, and when it is dropped."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from thinwire.plan.search import DENSE_MARGIN

TRIAL_STEPS = 12  # after a change, to be compared with dense
WINDOW_STEPS = 8  # the observed step time is the median of so many
DRIFT_STEPS = 8  # the median must be off for so many steps in a row
SETTLE_STEPS = 2  # after a change: new buffers, cold caches
DRIFT = 0.15
INEXACT = 0.25  # predictions may be off by this (docs/results/contest.md); what is by less is taken as it was measured
WORST_DRIFT = 0.6

Verdict = Literal["fine", "dense", "measure"]


@dataclass
class Watch:
    """Follows the steps of one plan on one rank.

    Args:
        expected_s: the predicted step, calibrated by what was measured before the plan; after the trial what that took.
        dense_s: what dense takes; infinite where dense is in use, or that is not known.
        drift: by how much the median may be off; doubled by every measurement that has changed nothing, so that a machine
            whose speed swings is not measured all the time.
    """

    expected_s: float
    dense_s: float
    drift: float = DRIFT
    _recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=TRIAL_STEPS))
    _steps: int = 0
    _drifting: int = 0

    @property
    def observed_s(self) -> float:
        """The smoothed step time; as expected where nothing was observed yet."""
        return median(list(self._recent_s)[-WINDOW_STEPS:]) if self._recent_s else self.expected_s

    def add(self, step_s: float) -> Verdict:
        """Take in one step: ``dense`` to fall back to it, ``measure`` to measure and plan again."""
        self._steps += 1
        if self._steps <= SETTLE_STEPS:
            return "fine"
        self._recent_s.append(step_s)
        if self._steps == SETTLE_STEPS + TRIAL_STEPS:
            return self._end_trial(median(self._recent_s))
        if len(self._recent_s) < WINDOW_STEPS:
            return "fine"
        self._drifting = self._drifting + 1 if self._off(self.observed_s) > self.drift else 0
        return "measure" if self._drifting >= DRIFT_STEPS else "fine"

    def _end_trial(self, tried_s: float) -> Verdict:
        if tried_s > (1 + DENSE_MARGIN) * self.dense_s:
            return "dense"
        if self._off(tried_s) <= INEXACT:
            self.expected_s, self._drifting = tried_s, 0
        return "fine"

    def _off(self, step_s: float) -> float:
        return abs(step_s / max(self.expected_s, 1e-9) - 1)

    def refitted(self, *, changed: bool) -> float:
        """The drift that the next plan may have."""
        return DRIFT if changed else min(2 * self.drift, WORST_DRIFT)
