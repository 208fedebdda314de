"""Evaluation loss at equal bytes, as Markdown and as a picture."""

from __future__ import annotations

import re
from statistics import fmean

from benchmarks.convergence.results import ANY, Results
from benchmarks.convergence.tasks import TASKS
from benchmarks.sparsifiers import bars
from benchmarks.sparsifiers.report import table
from benchmarks.sparsifiers.suite import BUDGET, budget_of


def report(results: Results) -> str:
    """Loss at equal bytes, one table per task."""
    parts = ["# Sparsifiers at equal bytes\n", _about(results)]
    return "\n".join([*parts, *(_equal_bytes(results, task) for task in results.tasks())])


def _about(results: Results) -> str:
    steps = sorted({result["steps"] for result in results.all})
    minutes = sum(result["seconds"] for result in results.all) / 60
    return (
        f"{len(results.all)} runs of {', '.join(map(str, steps))} steps, 4 simulated workers, {minutes:.0f} minutes of one "
        f"core. All but dense and int4 are set to the bytes of `{BUDGET}`; bytes are what one rank really sent per step. "
        "Loss on held-out data, one number per seed; the last column compares with dense of the same seeds.\n"
    )


def picture(results: Results) -> str:
    """How far above dense every method ends, as a picture; bars have no length where it ends below."""
    series: dict[str, dict[str, float]] = {}
    for task in results.tasks():
        above = {method_of(wire): gap for (wire, _), gap in _gaps(results, task).items() if gap is not None}
        series[TASKS[task].label] = dict(sorted(above.items(), key=lambda one: one[1]))
    return bars.picture("Evaluation loss above dense at equal bytes, %", series, ".1f")


def _equal_bytes(results: Results, task: str) -> str:
    budget_bytes, gaps = budget_of(TASKS[task]), _gaps(results, task)
    rows = []
    # Without a dense run of the same seed nothing can be compared: those come last.
    for (wire, who), gap in sorted(gaps.items(), key=lambda one: (one[1] is None, one[1] or 0.0)):
        found = results.find(task=task, compress=wire, optimizer=who, seed=ANY)
        sent_bytes = fmean(result["sent_bytes_per_step"] for result in found)
        losses = ", ".join(f"{result['loss']:.3f}" for result in found)
        traffic = f"{sent_bytes / 1000:.0f} kB ({sent_bytes / budget_bytes:.2f})"
        rows.append([_code(wire), who, traffic, losses, "" if gap is None else f"{gap:+.1f} %"])
    head = ["wire", "AdamW", f"bytes (of {budget_bytes / 1000:.0f} kB)", "loss by seed", "above dense"]
    return f"## {TASKS[task].label}\n\n{table(head, rows)}"


def _gaps(results: Results, task: str) -> dict[tuple[str, str], float | None]:
    """By wire and optimizer: how much higher the loss is than with dense, mean over the seeds that both have, in percent."""
    dense = {result["seed"]: result["loss"] for result in results.find(task=task, compress="dense", seed=ANY)}
    by_wire: dict[tuple[str, str], list[float]] = {}
    for result in results.all:
        if result["task"] == task:
            gaps = by_wire.setdefault((result["compress"], result["optimizer"]), [])
            if result["seed"] in dense:
                gaps.append(100 * (result["loss"] / dense[result["seed"]] - 1))
    return {key: fmean(gaps) if gaps else None for key, gaps in by_wire.items()}


def method_of(wire: str) -> str:
    """The wire without what was fitted to the budget, which differs between tasks."""
    return re.sub(r"(density|rank|block)=[^,)]*(, )?", "", wire).replace("()", "")


def _code(wire: str) -> str:
    return "`" + wire.replace("|", "\\|") + "`"
