"""How long the parts of a step take on this rank: what comes before the first gradient, and what depends on the network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from thinwire.engine.session import Session
from thinwire.plan.online import StepTimes


class StepClock:
    """Times steps from the end of one to the end of the next."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.resume()

    def resume(self) -> None:
        """A step begins: training goes on from here."""
        self._resumed_s = time.perf_counter()

    def read(self) -> StepTimes:
        """The step that has just ended."""
        now_s, ready_s = time.perf_counter(), self._session.meter.last_ready_s
        first_s = min(ready_s.values(), default=now_s)
        after_s = {name: at_s - first_s for name, at_s in ready_s.items()}
        return StepTimes(first_s - self._resumed_s, after_s, now_s - self._resumed_s)

    def exchange_s(self, times: StepTimes) -> float:
        """The part of a step that depends on the network. What a loop does between steps, now and then, is not in it.

        On accelerators nobody knows at the time when a gradient was computed; there it is the whole step.
        """
        return times.step_s - (times.before_s if self._session.device.type == "cpu" else 0.0)

    def usual_s(self, steps: Sequence[StepTimes]) -> float:
        """A whole step, with both parts as they usually are."""
        exchanges_s = [self.exchange_s(one) for one in steps]
        before_s = [one.step_s - exchange_s for one, exchange_s in zip(steps, exchanges_s, strict=True)]
        return median(before_s) + median(exchanges_s)
