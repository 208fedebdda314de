"""Run the cells of a contest on a lab, one job each; a cell that is done is kept and never run again."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from benchmarks.contest.cell import Cell, CellError, Score
from benchmarks.contest.floors import floor_s, make_model
from benchmarks.contest.lineup import AUTO, line_up, workload_of
from benchmarks.contest.sizes import CellCost, Size, cost_of_cell, size_cells, sized
from benchmarks.step.interleaved import Turns, warmup_steps

from thinwire.core import TensorSpec
from thinwire.demo.data import load_corpus
from thinwire.demo.fairness import KEEP_FREED_MEMORY
from thinwire.demo.settings import Workload
from thinwire.lab import BaseLab, format_rate, parse_rate
from thinwire.observe.events import Event, parse_event, read_events

WORKER = "benchmarks.contest.worker"
LAST_LINES = 15


class CellFailed(RuntimeError):
    """A worker ended with an error; the message ends with what the workers said last."""


@dataclass(frozen=True)
class Job:
    """A cell that may still have to be run."""

    workload: Workload
    rate: str
    parameters: int
    size: Size

    @property
    def turns(self) -> Turns:
        """What the workers are told."""
        return Turns(
            contestants=line_up(self.workload, self.rate),
            rounds=self.size.rounds,
            steps_per_turn=self.size.steps_per_turn,
            close_rounds=self.size.close_rounds,
            rival=AUTO,
        )

    @property
    def steps(self) -> int:
        """Of all contestants, with their warm-up, if all of them turn out to be close to ``auto``."""
        turns = self.turns
        timed = len(turns.contestants) * (turns.rounds + turns.close_rounds) * turns.steps_per_turn
        return timed + sum(map(warmup_steps, turns.contestants))

    def path(self, directory: Path) -> Path:
        """Where the cell is kept."""
        return directory / f"{self.workload.model}-{self.rate}.json"

    def done(self, directory: Path, hosts: int) -> Cell | None:
        """The cell, if an earlier run has measured it.

        Raises:
            CellError: what is there was measured with other settings.
        """
        path = self.path(directory)
        if not path.exists():
            return None
        cell = Cell.load(path)
        kept, wanted = (cell.hosts, cell.batch, cell.seq), (hosts, self.workload.batch, self.workload.seq)
        if kept != wanted:
            raise CellError(f"{path} has hosts, batch, seq = {kept}, expected {wanted}; choose another --out")
        return cell


def plan_jobs(
    models: Sequence[str],
    rates: Iterable[str],
    hosts: int,
    budget_s: float,
    rounds: int | None = None,
    steps: int | None = None,
) -> list[Job]:
    """All cells of a grid, sized to fit the budget, or as ``rounds`` (of everybody, and no more) and ``steps`` per turn say.

    Cells that are done already count too, so that a contest goes on with about the sizes it began with.
    """
    spelled = [format_rate(parse_rate(rate)) for rate in rates]
    grid = [(workload_of(model), rate) for model in models for rate in spelled]
    corpus = load_corpus()
    shapes = {model: _tensors(workload_of(model)) for model in models}
    floors_s = {model: floor_s(workload_of(model), corpus, hosts) for model in models}
    costs = [
        cost_of_cell(line_up(workload, rate), shapes[workload.model], floors_s[workload.model], hosts)
        for workload, rate in grid
    ]
    sizes = [
        _as_asked(cost, size, rounds, steps) for cost, size in zip(costs, size_cells(costs, budget_s), strict=True)
    ]
    return [
        Job(workload, rate, sum(tensor.numel for tensor in shapes[workload.model]), size)
        for (workload, rate), size in zip(grid, sizes, strict=True)
    ]


def _as_asked(cost: CellCost, size: Size, rounds: int | None, steps: int | None) -> Size:
    close_rounds = size.close_rounds if rounds is None else 0
    return sized(cost, rounds or size.rounds, steps or size.steps_per_turn, close_rounds)


def _tensors(workload: Workload) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(p.shape)) for name, p in make_model(workload).named_parameters()]


def run_job(job: Job, lab: BaseLab, on_step: Callable[[], None]) -> Cell:
    """Run one cell; ``on_step`` is called after every step of rank 0.

    Raises:
        CellFailed: a worker ended with an error.
    """
    lab.set_rate(None, job.rate)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="thinwire-contest-") as folder:
        settings = Path(folder) / "settings.json"
        job.turns.save(settings)
        said: list[str] = []

        def on_line(host: int, line: str) -> None:
            event = parse_event(line) if host == 0 else None
            if event is None:
                said.append(f"[host {host}] {line}")
            elif event["kind"] == "step":
                on_step()

        result = lab.run([sys.executable, "-m", WORKER, str(settings)], env=KEEP_FREED_MEMORY, on_line=on_line)
        if not result.ok:
            last_words = "\n".join(said[-LAST_LINES:]) or "(nothing)"
            raise CellFailed(f"{job.workload.model} at {job.rate}: a worker failed; they last said:\n{last_words}")
        events = list(read_events(Path(folder) / "rank0.jsonl"))
    return make_cell(job, events, hosts=lab.hosts, duration_s=result.duration_s, load=load)


def make_cell(job: Job, events: Sequence[Event], *, hosts: int, duration_s: float, load: float) -> Cell:
    """What rank 0 wrote, as a cell. A turn lies between two barriers, so one rank speaks for all."""
    predicted: dict[str, float] = next((event["step_s"] for event in events if event["kind"] == "prediction"), {})
    timed = [event for event in events if event["kind"] in ("step", "turn") and not event["warmup"]]
    workload = job.workload
    return Cell(
        model=workload.model,
        rate=job.rate,
        hosts=hosts,
        batch=workload.batch,
        seq=workload.seq,
        parameters=job.parameters,
        steps_per_turn=job.size.steps_per_turn,
        duration_s=duration_s,
        scores=tuple(_score(one.name, timed, predicted.get(one.name)) for one in job.turns.contestants),
        plans=tuple(_without_envelope(event) for event in events if event["kind"] == "plan"),
        facts={
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "load_before": f"{load:.2f}",
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )


def _score(name: str, timed: Sequence[Event], predicted_s: float | None) -> Score:
    own = [event for event in timed if event["contestant"] == name]
    return Score(
        contestant=name,
        turns_s=tuple(event["step_s"] for event in own if event["kind"] == "turn"),
        sent_bytes=statistics.fmean(event["sent_bytes"] for event in own if event["kind"] == "step"),
        predicted_s=predicted_s,
    )


def _without_envelope(event: Event) -> Event:
    return {key: value for key, value in event.items() if key not in ("v", "kind")}
