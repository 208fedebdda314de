"""How long a step takes on this rank, and how much of it lies before its first gradient."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from thinwire.autopilot.expect import StepTimes
from thinwire.observe.report import StepReport

_STRANGE = 2.0  # so many times the usual, and something else was done between two steps


class StepClock:
    """Times steps from the end of one exchange to the end of the next, without the pauses that planning makes.

    Args:
        is_cpu: on accelerators nobody knows at the time when a gradient was computed, so what lies before the first one
            counts as nothing.
    """

    def __init__(self, *, is_cpu: bool) -> None:
        self._is_cpu = is_cpu
        self._resumed_s = time.perf_counter()

    def read(self, report: StepReport, *, gradients: bool = True) -> StepTimes:
        """The step that has just ended.

        Args:
            gradients: also when each of them was ready, which takes time where there are many.
        """
        first_s = min(report.ready_s.values(), default=report.ended_s)
        after_s = {name: at_s - first_s for name, at_s in report.ready_s.items()} if gradients else {}
        return StepTimes(first_s - self._resumed_s, after_s, report.ended_s - self._resumed_s)

    def resume(self, report: StepReport, pause_s: float) -> None:
        """The next step began when this one ended, and was held up for so long."""
        self._resumed_s = report.ended_s + pause_s

    def before_s(self, times: StepTimes) -> float:
        """The part of a step that does not depend on the network, up to its first gradient."""
        return times.before_s if self._is_cpu else 0.0

    def step_s(self, times: StepTimes, usual_s: float) -> float:
        """A whole step, without what a loop does between two steps now and then.

        Where ranks share cores, the one that computes first waits longer for the others: only the sum says anything.

        Args:
            usual_s: what ``before_s`` is in other steps.
        """
        before_s = self.before_s(times)
        return times.step_s - (before_s - usual_s if before_s > _STRANGE * usual_s else 0.0)

    def usual_s(self, steps: Sequence[StepTimes]) -> float:
        """A whole step, as most are."""
        usual_before_s = median(self.before_s(one) for one in steps)
        return median(self.step_s(one, usual_before_s) for one in steps)
