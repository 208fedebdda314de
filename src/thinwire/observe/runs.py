"""Runs read back from their events: one ``Run`` per contestant, one ``Contest`` per directory of runs to compare."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.observe.events import Event, EventError, read_events
from thinwire.observe.kinds import KINDS

WARMUP_STEPS = 2  # first steps pay for connections, allocations and (in DDP) new buckets; no figure counts them


@dataclass(frozen=True)
class Point:
    """A loss, and when it was seen."""

    step: int
    elapsed_s: float
    loss: float


@dataclass(frozen=True)
class Run:
    """Everything known about one contestant: its header (rank 0's) and the events of all ranks."""

    directory: Path
    header: Event
    ranks: Sequence[Sequence[Event]]  # rank 0 first

    @property
    def label(self) -> str:
        """The name the run gave itself."""
        return str(self.header["label"])

    @property
    def is_floor(self) -> bool:
        """Whether this run exchanged nothing."""
        return bool(self.header["mode"] == "floor")

    @property
    def is_dense(self) -> bool:
        """Whether this run exchanged whole gradients: what the others are compared with."""
        settings = self.header.get("settings", {})
        return bool(self.header["mode"] == "ddp" or (not self.is_floor and settings.get("compress") == "dense"))

    @property
    def finished(self) -> bool:
        """Whether rank 0 finished."""
        return any(event["kind"] == "end" for event in self.ranks[0])

    def plans(self) -> list[Event]:
        """The plans of a run with ``compress="auto"``, in order."""
        return [event for event in self.ranks[0] if event["kind"] == "plan"]

    def steps(self) -> list[Event]:
        """The step events of all ranks without the warm-up; in a run that plans, everything up to its first plan is one.

        The step after the plan belongs to it too: it pays for new buffers.
        """
        planned = self.plans()
        first = planned[0]["step"] + 1 if planned else WARMUP_STEPS
        return [
            event for events in self.ranks for event in events if event["kind"] == "step" and event["step"] >= first
        ]

    def step_seconds(self) -> list[float]:
        """Seconds of every counted step on every rank."""
        return [event["step_s"] for event in self.steps()]

    def training_s(self) -> float:
        """Seconds of training of the slowest rank, without start-up and evaluation."""
        return max(
            (event["elapsed_s"] for events in self.ranks for event in events if "elapsed_s" in event), default=0.0
        )

    def mean_per_step(self, field: str) -> float | None:
        """The mean over steps and ranks of a field of the step events; None where no step has it."""
        values = [event[field] for event in self.steps() if field in event]
        return statistics.fmean(values) if values else None

    def training_loss(self) -> list[Point]:
        """The training loss at each step, averaged over the ranks that reported it; times are rank 0's."""
        losses: dict[int, list[float]] = defaultdict(list)
        for events in self.ranks:
            for event in events:
                if event["kind"] == "step" and "loss" in event:
                    losses[event["step"]].append(event["loss"])
        return [
            Point(event["step"], event["elapsed_s"], statistics.fmean(losses[event["step"]]))
            for event in self.ranks[0]
            if event["kind"] == "step" and event["step"] in losses
        ]

    def last_traces(self) -> list[Event]:
        """The trace of the latest step that all ranks traced, rank 0 first; empty if there is none."""
        traced = [{e["step"]: e for e in events if e["kind"] == "trace"} for events in self.ranks]
        common = set.intersection(*(set(steps) for steps in traced)) if traced else set()
        return [steps[max(common)] for steps in traced] if common else []

    def evaluations(self) -> list[Point]:
        """The evaluation losses in order."""
        return [
            Point(event["step"], event["elapsed_s"], event["loss"])
            for event in self.ranks[0]
            if event["kind"] == "eval"
        ]


@dataclass(frozen=True)
class Contest:
    """Runs to be compared with each other: same workload, same network."""

    directory: Path
    runs: Sequence[Run]

    @property
    def floor(self) -> Run | None:
        """The run with no communication, if there is one with counted steps."""
        return next((run for run in self.runs if run.is_floor and run.steps()), None)

    @property
    def dense(self) -> Run | None:
        """The run with whole gradients, if there is one."""
        return next((run for run in self.runs if run.is_dense), None)


def load_contests(paths: Iterable[Path]) -> list[Contest]:
    """Read run directories (searched for ``*.jsonl``) or single event files.

    Raises:
        EventError: nothing was found at a path, or a file was written by a newer thinwire.
    """
    by_contest: dict[Path, list[Run]] = defaultdict(list)
    for path in paths:
        runs = _load_runs(path)
        if not runs:
            raise EventError(
                f"no events found at {path}: expected a directory of a run (runs/...) or a .jsonl file of one"
            )
        for run in runs:
            by_contest[run.directory.parent].append(run)
    return [
        Contest(directory, sorted(runs, key=lambda run: str(run.header.get("started_at", ""))))
        for directory, runs in by_contest.items()
    ]


def _load_runs(path: Path) -> list[Run]:
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    by_directory: dict[Path, list[list[Event]]] = defaultdict(list)
    for file in filter(Path.is_file, files):
        if events := list(read_events(file, KINDS)):
            by_directory[file.resolve().parent].append(events)
    runs = (_make_run(directory, logs) for directory, logs in by_directory.items())
    return [run for run in runs if run is not None]


def _make_run(directory: Path, logs: list[list[Event]]) -> Run | None:
    """Join the files of one directory; None if none of them has a header (the run died before its first step)."""
    ranks = sorted((log for log in logs if log[0]["kind"] == "run"), key=lambda log: int(log[0]["rank"]))
    if not ranks:
        return None
    return Run(directory, ranks[0][0], ranks)
