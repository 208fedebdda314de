"""Who is told what an attached wire does."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from thinwire.observe.report import StepReport

log = logging.getLogger(__name__)


class Observer:
    """Base of all observers; override what is of interest. All calls come in the training thread.

    One that raises is logged once and dropped: ranks must not diverge over a full disk.
    """

    def on_step(self, report: StepReport) -> None:
        """A transaction has settled; what it cost."""

    def on_commit(self, outcome: Any) -> None:
        """The same with its tensors (``thinwire.exchange.Outcome``), before means are handed to ``.grad``."""

    def on_plan(self, step: int, plan: Any) -> None:
        """A plan (``thinwire.plan.Plan``) is in force from this step on."""

    def on_event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Anything else that is written to the event files; see ``thinwire.observe.events``."""

    def close(self) -> None:
        """The wire is detached."""


class Observers:
    """Several observers as one."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)

    def add(self, observer: Observer) -> None:
        """One more."""
        self._observers.append(observer)

    def on_step(self, report: StepReport) -> None:
        self._tell("on_step", report)

    def on_commit(self, outcome: Any) -> None:
        self._tell("on_commit", outcome)

    def on_plan(self, step: int, plan: Any) -> None:
        self._tell("on_plan", step, plan)

    def on_event(self, name: str, fields: Mapping[str, Any]) -> None:
        self._tell("on_event", name, fields)

    def close(self) -> None:
        self._tell("close")
        self._observers = []

    def _tell(self, what: str, *arguments: Any) -> None:
        for observer in list(self._observers):
            try:
                getattr(observer, what)(*arguments)
            except Exception:
                log.exception("%s failed in %s and is dropped", type(observer).__name__, what)
                self._observers.remove(observer)
