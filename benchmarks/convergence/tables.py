"""Results as Markdown tables for the docs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from benchmarks.convergence.grid import (
    ABLATION_TASKS,
    CLIP,
    DENSITIES,
    LARGE_TASK,
    LR_FACTORS,
    MAIN_TASK,
    SGD_TASK,
    WARMUP,
    by_update,
    topk,
)
from benchmarks.convergence.results import ANY, Result, Results
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.train import MASKED_SGD, OURS, SGD, STOCK
from benchmarks.convergence.variants import GRAINS, VARIANTS

STOCK_DDP = "stock DDP"  # as `thinwire bench step` calls it; its loss is that of the dense wire
AS_SHIPPED = "as shipped: s²/a, cap 200, per element"
SELECTORS = ("topk", "adtopk", "bank")
COMPARED = (("dense", STOCK), (WARMUP, OURS), (by_update(0.05), OURS), (topk(0.05), OURS), (topk(0.05), STOCK))


def report(results: Results, step_times: Path | None) -> str:
    """All tables for which there are results."""
    parts = ["# Convergence over a sparse wire\n", _provenance(results)]
    parts += [_main(results, task) for task in results.tasks()]
    parts += [_seeds(results), _rates(results), _ablation(results), _grains(results), _habits(results), _sgd(results)]
    if step_times is not None:
        parts.append(_wall_time(results, json.loads(step_times.read_text(encoding="utf-8"))))
    return "\n".join(part for part in parts if part)


def _provenance(results: Results) -> str:
    steps = sorted({result["steps"] for result in results.all})
    seconds = sum(result["seconds"] for result in results.all)
    return (
        f"{len(results.all)} runs of {', '.join(map(str, steps))} steps, 4 simulated workers, {seconds / 60:.0f} minutes of "
        "one core. Learning rate: warm-up, constant, cool-down. Evaluation loss on fixed held-out batches; in brackets, the "
        "difference to dense.\n"
    )


def _main(results: Results, task: str) -> str:
    dense = results.loss(task=task, compress="dense")
    rows = [["dense, stock AdamW", _cell(dense, None), "", ""]]
    rows.append(["int4, stock AdamW", _cell(results.loss(task=task, compress="int4"), dense), "", ""])
    wires = [WARMUP, *map(by_update, DENSITIES), *(topk(d, selector) for selector in SELECTORS for d in DENSITIES)]
    for wire in wires:
        found = {who: results.find(task=task, compress=wire, optimizer=who) for who in (STOCK, OURS)}
        if any(found.values()):
            cells = [_cell(found[who][0]["loss"] if found[who] else None, dense) for who in (STOCK, OURS)]
            rows.append([f"`{wire}`", *cells, _traffic(next(f[0] for f in found.values() if f))])
    head = ["wire", "stock AdamW", "thinwire.optim.AdamW", "values received per step"]
    return f"## {TASKS[task].label}\n\n{_table(head, rows)}"


def _traffic(result: Result) -> str:
    return f"{100 * result['received_share']:.1f} %"


def _seeds(results: Results) -> str:
    """The claim, and where sparsifiers lose most."""
    names = {
        ("dense", STOCK): "dense",
        (WARMUP, OURS): "0.05 by update after warm-up, ours",
        (by_update(0.05), OURS): "0.05 by update, ours",
        (topk(0.05), OURS): "0.05, ours",
        (topk(0.05), STOCK): "0.05, stock AdamW",
        (by_update(0.01), OURS): "0.01 by update, ours",
        (topk(0.01, "bank"), OURS): "bank 0.01, ours",
        (topk(0.01), STOCK): "0.01, stock AdamW",
    }
    rows = [
        [TASKS[task].label, *(_over_seeds(results, task, wire, who) for wire, who in names)] for task in results.tasks()
    ]
    rows = [row for row in rows if "," in row[1]]
    return f"## Seeds\n\n{_table(['task', *names.values()], rows)}" if rows else ""


def _rates(results: Results) -> str:
    rows = []
    for wire, who in COMPARED:
        losses = [results.loss(task=MAIN_TASK, compress=wire, optimizer=who, lr_factor=f) for f in LR_FACTORS]
        rows.append([f"{wire}, {who}", *(_cell(loss, None) for loss in losses)])
    base = TASKS[MAIN_TASK].learning_rate
    head = ["learning rate", *(f"{base * factor:g}" for factor in LR_FACTORS)]
    return f"## Learning rates ({TASKS[MAIN_TASK].label})\n\n{_table(head, rows)}" if any(rows[0][2:]) else ""


def _ablation(results: Results) -> str:
    rows = []
    dense = {task: results.loss(task=task, compress="dense") for task in ABLATION_TASKS}
    for label, name in ((AS_SHIPPED, OURS), *((name, name) for name in VARIANTS)):
        losses = {task: results.loss(task=task, compress=topk(0.05), optimizer=name) for task in ABLATION_TASKS}
        rows.append([label, *(_cell(loss, dense[task]) for task, loss in losses.items())])
    head = ["form", *(f"{TASKS[task].label}, top-k 0.05" for task in ABLATION_TASKS)]
    found = any(cell for row in rows[1:] for cell in row[1:])
    return f"## Ablation\n\n{_table(head, rows)}" if found else ""


def _grains(results: Results) -> str:
    """One age for many coordinates, with the score that ships: three seeds, and everybody's best learning rate."""
    rows = []
    forms = [("dense", "dense", STOCK), ("per element", by_update(0.05), OURS)]
    forms += [(name.removeprefix("one age "), by_update(0.05), name) for name in GRAINS]
    tried = [
        t for t in results.tasks() if results.find(task=t, compress=by_update(0.05), optimizer=GRAINS[0], seed=ANY)
    ]
    for task in tried:
        for label, wire, who in forms:
            rates = [results.loss(task=task, compress=wire, optimizer=who, lr_factor=factor) for factor in LR_FACTORS]
            best = min((loss for loss in rates if loss is not None), default=None)
            cells = [f"**{_cell(loss, None)}**" if loss == best else _cell(loss, None) for loss in rates]
            rows.append([TASKS[task].label, label, _over_seeds(results, task, wire, who), *cells])
    head = ["task", "age", "three seeds", *(f"seed 0, rate x {factor:g}" for factor in LR_FACTORS)]
    return f"## Ages by update\n\n{_table(head, rows)}" if rows else ""


def _over_seeds(results: Results, task: str, wire: str, who: str) -> str:
    """The loss of every seed, and the mean difference to dense of the same seeds."""
    dense = {result["seed"]: result["loss"] for result in results.find(task=task, compress="dense", seed=ANY)}
    found = {r["seed"]: r["loss"] for r in results.find(task=task, compress=wire, optimizer=who, seed=ANY)}
    if not found:
        return ""
    losses = ", ".join(f"{loss:.3f}" for _, loss in sorted(found.items()))
    differences = [loss / dense[seed] - 1 for seed, loss in found.items() if seed in dense]
    return losses if wire == "dense" or not differences else f"{losses} ({100 * fmean(differences):+.1f} %)"


def _habits(results: Results) -> str:
    rows = []
    for label, change in ((f"clipped to norm {CLIP}", {"clip": CLIP}), ("beta2 = 0.95", {"beta2": 0.95})):
        dense = results.loss(task=MAIN_TASK, compress="dense", **change)
        ours = results.loss(task=MAIN_TASK, compress=topk(0.05), optimizer=OURS, **change)
        stock = results.loss(task=MAIN_TASK, compress=topk(0.05), optimizer=STOCK, **change)
        rows.append([label, _cell(dense, None), _cell(ours, dense), _cell(stock, dense)])
    head = ["setting", "dense", "topk 0.05, ours", "topk 0.05, stock AdamW"]
    found = any(cell for row in rows for cell in row[1:])
    return f"## Clipping and beta2 ({TASKS[MAIN_TASK].label})\n\n{_table(head, rows)}" if found else ""


def _sgd(results: Results) -> str:
    dense = results.loss(task=SGD_TASK, compress="dense", optimizer=SGD)
    rows = [["dense, stock SGD", _cell(dense, None), _cell(dense, None)]]
    for who in (SGD, *MASKED_SGD):
        losses = [results.loss(task=SGD_TASK, compress=topk(density), optimizer=who) for density in (0.05, 0.01)]
        rows.append([who, *(_cell(loss, dense) for loss in losses)])
    head = ["optimizer", "topk 0.05", "topk 0.01"]
    found = any(cell for row in rows for cell in row[1:])
    return f"## SGD with momentum 0.9 ({TASKS[SGD_TASK].label})\n\n{_table(head, rows)}" if found else ""


def _wall_time(results: Results, cells: list[dict[str, object]]) -> str:
    """Loss at equal wall time: curves of the large GPT against step times measured on the lab.

    Args:
        cells: what ``thinwire bench step --json`` writes.
    """
    parts = []
    for rate in dict.fromkeys(str(cell["rate"]) for cell in cells):
        times = {str(c["contestant"]).removeprefix("thinwire "): float(str(c["median_step_s"])) for c in cells
                 if c["rate"] == rate}  # fmt: skip
        parts.append(_at_rate(results, rate, times))
    return "\n".join(parts)


def _at_rate(results: Results, rate: str, times: dict[str, float]) -> str:
    dense = results.find(task=LARGE_TASK, compress="dense")
    if not dense or STOCK_DDP not in times:
        return ""
    marks_s = [dense[0]["steps"] * times[STOCK_DDP] * share for share in (0.1, 0.25, 0.5, 1.0)]
    rows = []
    for wire, step_s in times.items():
        for who in (STOCK, OURS):
            found = results.find(task=LARGE_TASK, compress="dense" if wire == STOCK_DDP else wire, optimizer=who)
            if found:
                losses = [_cell(loss_after(found[0]["curve"], mark / step_s), None) for mark in marks_s]
                rows.append([f"{wire}, {who} AdamW", f"{step_s:.2f} s", *losses])
    head = ["wire", "step", *(f"after {mark:.0f} s" for mark in marks_s)]
    return f"## Equal wall time at {rate} ({TASKS[LARGE_TASK].label})\n\n{_table(head, rows)}"


def loss_after(curve: Sequence[Sequence[float]], steps: float) -> float | None:
    """The evaluation loss after so many steps, between evaluations on a straight line; None before the first.

    A run that had ended by then keeps its last loss: it was not trained any longer.
    """
    if steps < curve[0][0]:
        return None
    for (step, loss), (next_step, next_loss) in pairwise(curve):
        if steps < next_step:
            return loss + (next_loss - loss) * (steps - step) / (next_step - step)
    return curve[-1][1]


def _cell(loss: float | None, dense: float | None) -> str:
    if loss is None:
        return ""
    return f"{loss:.3f}" if dense is None else f"{loss:.3f} ({100 * (loss / dense - 1):+.1f} %)"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
