"""Run the benchmark, or go on with it: ``python -m benchmarks.convergence`` from the root of the repository.

Finished runs are kept in ``--out`` and skipped the next time, so it may be stopped with Ctrl-C at any moment. Tables
(``results.md``) and curves (one SVG per task) are made anew from whatever is there.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path

from benchmarks.convergence import curves, data, results, tables
from benchmarks.convergence.grid import check_tasks, grid, quick_grid
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.train import Run, train
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

FULL_STEPS, QUICK_STEPS = 500, 10


def main() -> None:
    """Read the command line, run what is missing, write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"few runs of {QUICK_STEPS} steps: does everything work?")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help=f"of {', '.join(TASKS)} (default: all)")
    parser.add_argument("--steps", type=int, help=f"steps per run (default: {FULL_STEPS}, quick {QUICK_STEPS})")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time, one thread each (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("runs/convergence"), help="folder (default: runs/convergence)")
    parser.add_argument("--step-times", type=Path, help="what 'thinwire bench step --json' wrote, for equal wall time")
    parser.add_argument("--list", action="store_true", help="list the runs that are missing, run nothing")
    parser.add_argument("--tables-only", action="store_true", help="run nothing, write the tables")
    arguments = parser.parse_args()
    console = Console()

    tasks = _obtainable(console, check_tasks(arguments.tasks)) if not arguments.tables_only else arguments.tasks
    steps = arguments.steps or (QUICK_STEPS if arguments.quick else FULL_STEPS)
    wanted = (quick_grid if arguments.quick else grid)(tasks, steps)
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = arguments.out / "runs.jsonl"
    missing = [run for run in wanted if run.key not in results.read(log)]
    if arguments.list:
        console.print("\n".join(run.key for run in missing), f"{len(missing)} of {len(wanted)} runs missing", sep="\n")
        return
    if not arguments.tables_only:
        _run_all(console, missing, log, arguments.processes)
    _write(console, log, arguments.out, arguments.step_times)


def _obtainable(console: Console, tasks: list[str]) -> list[str]:
    """The tasks whose data can be had; fetches it before several processes would."""
    found = []
    for name in tasks:
        try:
            TASKS[name].source.batch(0, 0, 0)
            found.append(name)
        except data.Unavailable as error:
            console.print(f"[yellow]skipping {name}: {error}[/]")
    return found


def _run_all(console: Console, missing: list[Run], log: Path, processes: int) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Spawned, not forked: a fork of a process in which torch has run may hang.
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("training", total=len(missing))
        pending = {pool.submit(train, run): run for run in missing}
        try:
            while pending:
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    run, result = pending.pop(future), future.result()
                    results.append(log, result)
                    progress.advance(bar)
                    progress.console.print(
                        f"{run.task}: {run.compress}, {run.optimizer}, seed {run.seed}: loss {result['loss']:.3f} "
                        f"in {result['seconds']:.0f} s"
                    )
        except KeyboardInterrupt:
            progress.console.print("[yellow]Stopped; the same command goes on from here.[/]")
            for process in pool._processes.values():  # the pool itself would wait for runs that take minutes
                process.terminate()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _write(console: Console, log: Path, folder: Path, step_times: Path | None) -> None:
    found = results.Results(results.read(log).values())
    if not found.all:
        console.print("nothing has been run yet")
        return
    text = tables.report(found, step_times)
    (folder / "results.md").write_text(text, encoding="utf-8")
    pictures = curves.write(found, folder)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"written: {folder / 'results.md'}, {', '.join(map(str, pictures))}")


if __name__ == "__main__":
    main()
