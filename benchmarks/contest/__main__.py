"""``python -m benchmarks.contest``: every method on every network and model, predicted and measured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

if TYPE_CHECKING:
    from benchmarks.contest.run import Job

    from thinwire.lab import BaseLab

STOPPED_STATUS = 130  # as a shell reports Ctrl-C
QUICK_ROUNDS, QUICK_STEPS = 2, 2


def bench_contest_command(
    models: Annotated[str | None, typer.Option(help="Models, separated by commas. (default: small,lstm,cnn)")] = None,
    rates: Annotated[
        str | None, typer.Option(help="Link rates, separated by commas. (default: 20mbit to 1gbit, unshaped)")
    ] = None,
    hosts: Annotated[int, typer.Option(help="Number of hosts.", min=2)] = 4,
    minutes: Annotated[float, typer.Option(help="Cells get as many steps as fit into this time.", min=1)] = 90,
    rounds: Annotated[
        int | None,
        typer.Option(help="Turns of every contestant. (default: as fits, and more for those close to auto)", min=1),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps per turn. (default: as fits)", min=1)] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where cells are kept; those already there are not run again. (default: runs/contest[-quick])"
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny GPT at two rates, few steps: to see that it works.")
    ] = False,
) -> None:
    """Time every contestant in every cell (a model at a link rate), and compare with what the planner predicts.

    Each cell is one job in which the floor, stock DDP, DDP with torch's fp16 and PowerSGD hooks, fixed thinwire settings and
    `auto` take turns. A finished cell is a JSON file; Ctrl-C loses only the cell under way, and the same command goes on.
    Writes summary.md and contest.html. Needs root (network namespaces) and an idle machine.
    """
    from benchmarks.contest.cell import load_cells
    from benchmarks.contest.lineup import MODELS, QUICK_MODELS, QUICK_RATES, RATES
    from benchmarks.contest.run import plan_jobs

    console = Console()
    out = out or Path("runs") / ("contest-quick" if quick else "contest")
    if quick:
        rounds, steps = rounds or QUICK_ROUNDS, steps or QUICK_STEPS
    chosen_models = models.split(",") if models else QUICK_MODELS if quick else MODELS
    chosen_rates = rates.split(",") if rates else QUICK_RATES if quick else RATES
    try:
        load_cells(out)  # finds files that are no cells now rather than after 90 minutes
        jobs = plan_jobs(chosen_models, chosen_rates, hosts, 60 * minutes, rounds, steps)
        waiting = [job for job in jobs if job.done(out, hosts) is None]
    except ValueError as error:
        console.print(Text(str(error), style="red"))
        raise typer.Exit(2) from error
    _introduce(console, jobs, waiting)
    status = _run(console, waiting, hosts, out) if waiting else 0
    _write(out)
    console.print(f"Summary: {out / 'summary.md'}\nPictures: {out / 'contest.html'}", highlight=False, soft_wrap=True)
    raise typer.Exit(status)


def _introduce(console: Console, jobs: list[Job], waiting: list[Job]) -> None:
    for job in waiting:
        size = job.size
        turns = f"{size.rounds} turns of {size.steps_per_turn}"
        turns += f", {size.close_rounds} more for those close to auto" if size.close_rounds else ""
        console.print(
            f"{job.workload.model} at {job.rate}: {turns}, about {size.seconds / 60:.1f} min", highlight=False
        )
    total_s = sum(job.size.seconds for job in waiting)
    console.print(
        f"{len(jobs) - len(waiting)} of {len(jobs)} cells are done; the others take about {total_s / 60:.0f} min."
    )


def _run(console: Console, waiting: list[Job], hosts: int, out: Path) -> int:
    """Run what is to be run; the exit status. A cell that fails is reported and the next one is tried."""
    from benchmarks.contest.run import CellFailed

    from thinwire.lab import Lab, LabError

    status = 0
    times_s: list[tuple[float, float]] = []
    try:
        with Lab(hosts) as lab:
            for index, job in enumerate(waiting):
                began_s = time.monotonic()
                try:
                    _run_one(console, job, lab, out)
                except CellFailed as error:
                    console.print(Text(str(error), style="red"))
                    status = 1
                _write(out)
                times_s.append((job.size.seconds, time.monotonic() - began_s))
                _tell(console, waiting, index, times_s)
    except KeyboardInterrupt:
        console.print("[yellow]Stopped. The cells that were done are kept; the same command goes on with the rest.[/]")
        status = STOPPED_STATUS
    except LabError as error:
        console.print(Text(str(error), style="red"))
        status = 2
    return status


def _run_one(console: Console, job: Job, lab: BaseLab, out: Path) -> None:
    from benchmarks.contest.run import run_job

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{job.workload.model} at {job.rate}", total=job.steps)
        run_job(job, lab, lambda: progress.advance(task)).save(job.path(out))


def _tell(console: Console, waiting: list[Job], index: int, times_s: list[tuple[float, float]]) -> None:
    """A line that stays, for whoever reads the log of a run in the background."""
    from benchmarks.contest.sizes import seconds_left

    job, (estimated_s, took_s) = waiting[index], times_s[-1]
    left_s = seconds_left(times_s, [later.size.seconds for later in waiting[index + 1 :]])
    console.print(
        f"{index + 1} of {len(waiting)} cells: {job.workload.model} at {job.rate} took {took_s:.0f} s "
        f"(estimated {estimated_s:.0f} s); about {left_s / 60:.0f} min left",
        highlight=False,
    )


def _write(out: Path) -> None:
    """What all cells of the directory say; after every cell, for whoever looks in while others are being measured."""
    from benchmarks.contest.cell import load_cells
    from benchmarks.contest.page import write_page
    from benchmarks.contest.summary import summary

    cells = load_cells(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.md").write_text(summary(cells), encoding="utf-8")
    write_page(cells, out / "contest.html")


if __name__ == "__main__":
    typer.run(bench_contest_command)
