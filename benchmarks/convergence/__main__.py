"""Run the benchmark, or go on with it: ``python -m benchmarks.convergence`` from the root of the repository.

Finished runs are kept in ``--out`` and skipped the next time, so it may be stopped with Ctrl-C at any moment. Tables
(``results.md``) and pictures (SVG) are made anew from whatever is there. The suite ``optimizers`` asks what an optimizer must
know about sparse updates, ``sparsifiers`` compares sparsifiers at equal bytes, ``sync`` policies at equal steps.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks.convergence import curves, data, results, sync, tables
from benchmarks.convergence.grid import check_tasks, grid, quick_grid
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.train import Run, train
from benchmarks.sparsifiers import loss_tables, suite
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

FULL_STEPS, QUICK_STEPS = 500, 10
OPTIMIZERS, SPARSIFIERS, SYNC = "optimizers", "sparsifiers", "sync"
DEFAULTS = {  # by suite: tasks, steps, folder
    OPTIMIZERS: (tuple(TASKS), FULL_STEPS, "runs/convergence"),
    SPARSIFIERS: (suite.DEFAULT_TASKS, suite.STEPS, "runs/sparsifiers"),
    SYNC: (sync.DEFAULT_TASKS, FULL_STEPS, "runs/sync"),
}


def main() -> None:
    """Read the command line, run what is missing, write the tables."""
    arguments = _arguments()
    console = Console()
    tasks = _obtainable(console, check_tasks(arguments.tasks)) if not arguments.tables_only else arguments.tasks
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = arguments.out / "runs.jsonl"
    if arguments.suite == SYNC:
        _sync(console, arguments, tasks, log)
        return
    if arguments.list or not arguments.tables_only:
        wanted = _wanted(console, arguments, tasks)
        missing = [run for run in wanted if run.key not in results.read(log)]
        if arguments.list:
            keys = "\n".join(run.key for run in missing)
            console.print(keys, f"{len(missing)} of {len(wanted)} runs missing", sep="\n")
            return
        _run_all(console, missing, log, arguments.processes, train)
    _write(console, log, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"few runs of {QUICK_STEPS} steps: does everything work?")
    parser.add_argument(
        "--suite",
        choices=(OPTIMIZERS, SPARSIFIERS, SYNC),
        default=OPTIMIZERS,
        help="what is compared (default: optimizers)",
    )
    parser.add_argument("--tasks", nargs="+", help=f"of {', '.join(TASKS)} (default: {_TASKS_HELP})")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="sparsifiers: only these (default: all)")
    parser.add_argument("--steps", type=int, help=f"steps per run (default: {_STEPS_HELP})")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time, one thread each (default: 2)")
    parser.add_argument("--out", type=Path, help="folder (default: runs/convergence, runs/sparsifiers, runs/sync)")
    parser.add_argument("--step-times", type=Path, help="what 'thinwire bench step --json' wrote, for equal wall time")
    parser.add_argument("--list", action="store_true", help="list the runs that are missing, run nothing")
    parser.add_argument("--tables-only", action="store_true", help="run nothing, write the tables")
    arguments = parser.parse_args()
    tasks, full_steps, folder = DEFAULTS[arguments.suite]
    arguments.tasks = arguments.tasks or list(tasks)
    arguments.out = arguments.out or Path(folder)
    arguments.steps = arguments.steps or (QUICK_STEPS if arguments.quick else full_steps)
    unknown = [name for name in arguments.methods or () if name not in suite.names()]
    if unknown or (arguments.methods and arguments.suite != SPARSIFIERS):
        parser.error(f"--methods {unknown}: expected, with --suite sparsifiers, some of {suite.names()}")
    return arguments


_TASKS_HELP = f"all; sparsifiers {', '.join(suite.DEFAULT_TASKS)}; sync {', '.join(sync.DEFAULT_TASKS)}"
_STEPS_HELP = f"{FULL_STEPS}, sparsifiers {suite.STEPS}, quick {QUICK_STEPS}"


def _sync(console: Console, arguments: argparse.Namespace, tasks: list[str], log: Path) -> None:
    """Which rate is best is known only after the first runs, so what is missing is asked again and again."""
    while not arguments.tables_only:
        finished = sync.read(log)
        wanted = sync.wanted(tasks, arguments.steps, finished, quick=arguments.quick)
        missing = [run for run in wanted if run.key not in finished]
        if arguments.list:
            console.print(
                "\n".join(map(str, missing)), f"{len(missing)} of {len(wanted)} runs missing so far", sep="\n"
            )
            return
        if not missing or not _run_all(console, missing, log, arguments.processes, sync.train):
            break
    text = sync.report([run for run in sync.read(log).values() if run["steps"] == arguments.steps])
    (arguments.out / "results.md").write_text(text, encoding="utf-8")
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _wanted(console: Console, arguments: argparse.Namespace, tasks: list[str]) -> list[Run]:
    """The runs of the suite; for sparsifiers, after their settings have been found and shown."""
    if arguments.suite == OPTIMIZERS:
        return (quick_grid if arguments.quick else grid)(tasks, arguments.steps)
    settings = {name: suite.settings(TASKS[name], arguments.methods or suite.names()) for name in tasks}
    for name, methods in settings.items():
        budget_bytes = suite.budget_of(TASKS[name])
        shown = Table("method", "spec", f"x {budget_bytes / 1000:.1f} kB", title=f"{name}, at {suite.BUDGET}")
        for method in methods:
            shown.add_row(method.label, method.spec, f"{method.wire_bytes / budget_bytes:.2f}")
        console.print(shown)
    return suite.grid(settings, arguments.steps)


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


def _run_all(
    console: Console, missing: Sequence[Any], log: Path, processes: int, train: Callable[[Any], dict[str, Any]]
) -> bool:
    """Whether all of them have ended; a stopped benchmark says no."""
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
                    progress.console.print(f"{run}: loss {result['loss']:.3f} in {result['seconds']:.0f} s")
        except KeyboardInterrupt:
            progress.console.print("[yellow]Stopped; the same command goes on from here.[/]")
            for process in pool._processes.values():  # the pool itself would wait for runs that take minutes
                process.terminate()
            return False
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return True


def _write(console: Console, log: Path, arguments: argparse.Namespace) -> None:
    folder: Path = arguments.out
    runs = list(results.read(log).values())
    if arguments.suite == SPARSIFIERS:  # what was tried out with fewer steps does not belong into a mean over seeds
        runs = [run for run in runs if run["steps"] == arguments.steps]
    found = results.Results(runs)
    if not found.all:
        console.print("nothing has been run yet")
        return
    if arguments.suite == OPTIMIZERS:
        text, pictures = tables.report(found, arguments.step_times), curves.write(found, folder)
    else:
        text, pictures = loss_tables.report(found), [folder / "above-dense.svg"]
        pictures[0].write_text(loss_tables.picture(found), encoding="utf-8")
    (folder / "results.md").write_text(text, encoding="utf-8")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"written: {folder / 'results.md'}, {', '.join(map(str, pictures))}")


if __name__ == "__main__":
    main()
