"""The live view of the demo: one progress line per contestant."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from thinwire.demo.settings import Contestant
from thinwire.observe.events import Event

RECENT_STEPS = 7  # the step time shown and the ETA follow the median of these


@dataclass
class _Line:
    """What a contestant's line shows."""

    task: TaskID
    recent_s: list[float] = field(default_factory=list)
    sent_bytes: int = 0
    evaluation: str = ""

    def figures(self, event: Event, steps_left: int) -> str:
        step_s = statistics.median(self.recent_s)
        left = f"  {steps_left * step_s:3.0f} s left" if steps_left else ""
        return f"loss {event['loss']:.3f}{self.evaluation}  {step_s:.2f} s/step  {self.sent_bytes / 1e6:.0f} MB{left}"


class LiveView:
    """Shows each contestant's step, loss, step time, megabytes sent and time left; a context manager."""

    def __init__(self, console: Console) -> None:
        """Draw on ``console``; nothing moves if it is not a terminal."""
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}"),
            console=console,
            expand=True,
            refresh_per_second=5,
        )
        self._lines: dict[str, _Line] = {}

    def __enter__(self) -> LiveView:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def started(self, contestant: Contestant) -> None:
        """Add the contestant's line."""
        self._lines[contestant.name] = _Line(
            self._progress.add_task(contestant.label, total=contestant.workload.steps, figures="starting workers ...")
        )

    def event(self, contestant: Contestant, event: Event) -> None:
        """Bring the contestant's line up to date."""
        line = self._lines[contestant.name]
        if event["kind"] == "step":
            line.recent_s = [*line.recent_s[-RECENT_STEPS + 1 :], event["step_s"]]
            line.sent_bytes += event["sent_bytes"]
            steps_left = contestant.workload.steps - event["step"] - 1
            self._progress.update(line.task, completed=event["step"] + 1, figures=line.figures(event, steps_left))
        elif event["kind"] == "eval" and contestant.mode != "floor":
            line.evaluation = f"  eval {event['loss']:.3f}"
