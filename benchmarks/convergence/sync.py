"""The suite ``sync``: policies at equal steps, each at its own best learning rate, over workers that are threads.

First every contestant runs at several rates with one seed; then the best rate of each runs with the other seeds. Losses are
of the mean of the replicas, in full precision; that of the anchor is written down beside it.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from benchmarks.convergence.tasks import TASKS, WORKERS, Batch
from benchmarks.convergence.threads import Transport, run_workers
from benchmarks.convergence.train import EVALUATIONS, evaluate, recipe, schedule

import thinwire

DEFAULT_TASKS = ("gpt1m",)
SEEDS = (0, 1, 2)
RATES = (1.0, 2.0, 4.0)  # times the task's: local steps want a higher one
# Rates are bracketed here, so no policy scales them by itself.
CONTESTANTS: dict[str, tuple[str, str]] = {  # by label: sync and compress
    "dense": ("every_step", "dense"),
    "int4 every step": ("every_step", "int4"),
    "stream, 4 bits, 1 slice": ("stream(bits=4, slices=1, lr_scale=1.0)", "auto"),
    "stream, 2 bits, 2 slices": ("stream(bits=2, slices=2, lr_scale=1.0)", "auto"),
    "stream, 1 bit, 4 slices": ("stream(bits=1, slices=4, lr_scale=1.0)", "auto"),
    "local, h = 8, int4": ("local(h=8, compress='int4')", "auto"),
    "DiLoCo, h = 30, int4": ("diloco(h=30, compress='int4')", "auto"),
    "SPARTA, 0.5 %": ("sparta(density=0.005)", "auto"),
    "SparseLoCo, h = 30": ("sparseloco(h=30)", "auto"),
}
QUICK = ("dense", "stream, 2 bits, 2 slices", "DiLoCo, h = 30, int4")


@dataclass(frozen=True, kw_only=True)
class SyncRun:
    """What one run does; its text identifies it among the results."""

    task: str
    label: str
    sync: str
    compress: str
    steps: int
    workers: int = WORKERS
    seed: int = 0
    lr_factor: float = 1.0

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    def __str__(self) -> str:
        return f"{self.task}: {self.label}, rate × {self.lr_factor:g}, seed {self.seed}"


def train(run: SyncRun) -> dict[str, Any]:
    """The run's settings and what came of it; needs only numbers and strings to be written down."""
    torch.set_num_threads(1)
    task, began_s = TASKS[run.task], time.perf_counter()
    models = [copy.deepcopy(task.build(run.seed)) for _ in range(run.workers)]
    evaluation, curve, anchor = task.source.evaluation(), [], [0.0]

    def work(rank: int, transport: Transport) -> float:
        model = models[rank]
        optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
        settings: dict[str, Any] = {"sync": run.sync, "compress": run.compress, "seed": run.seed}
        with thinwire.attach(model, optimizer, transport=transport, **settings) as wire:
            apart = wire.stats().wire_bytes  # sent to start from equal weights, and to evaluate
            for step in range(run.steps):
                for group in optimizer.param_groups:
                    group["lr"] = run.lr_factor * task.learning_rate * schedule(step, run.steps)
                optimizer.zero_grad()
                loss = model(*_batch(run, step, rank))
                loss.backward()
                wire.report_loss(loss)
                optimizer.step()
                if (step + 1) * EVALUATIONS // run.steps > step * EVALUATIONS // run.steps:
                    before = wire.stats().wire_bytes
                    with wire.averaged(exact=True):
                        if rank == 0:
                            curve.append([step + 1, evaluate(model, evaluation)])
                    apart += wire.stats().wire_bytes - before
            if rank == 0:
                with wire.averaged():
                    anchor[0] = evaluate(model, evaluation)
            return (wire.stats().wire_bytes - apart) / run.steps

    sent = run_workers(work, run.workers)
    return {
        **asdict(run),
        "recipe": recipe(task),
        "curve": curve,
        "loss": curve[-1][1],
        "anchor_loss": anchor[0],
        "seconds": time.perf_counter() - began_s,
        "sent_bytes_per_step": sent[0],
    }


def _batch(run: SyncRun, step: int, rank: int) -> Batch:
    """Every worker of every step has a batch of its own, also where there are more or fewer workers than usual."""
    number = step * run.workers + rank
    return TASKS[run.task].source.batch(number // WORKERS, number % WORKERS, run.seed)


def wanted(tasks: Sequence[str], steps: int, finished: Mapping[str, Any], *, quick: bool) -> list[SyncRun]:
    """The runs so far: all rates with the first seed, and the other seeds of those whose best rate is known."""
    runs = []
    for task in tasks:
        for label, (sync, compress) in CONTESTANTS.items():
            if quick and label not in QUICK:
                continue
            bracket = [
                SyncRun(task=task, label=label, sync=sync, compress=compress, steps=steps, lr_factor=rate)
                for rate in (RATES[:1] if quick else RATES)
            ]
            runs += bracket
            if not quick and all(run.key in finished for run in bracket):
                best = min(bracket, key=lambda run: finished[run.key]["loss"])
                runs += [SyncRun(**{**asdict(best), "seed": seed}) for seed in SEEDS[1:]]
    return runs


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Finished runs by key; lines that were cut off, and results of another recipe than today's, are left out."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        if result.get("recipe") == recipe(TASKS[result["task"]]):
            found[SyncRun(**{field.name: result[field.name] for field in fields(SyncRun)}).key] = result
    return found


def report(results: Sequence[Mapping[str, Any]]) -> str:
    """A table for each task: every contestant at its best rate, beside dense."""
    lines = ["# Policies at equal steps", ""]
    for task in dict.fromkeys(result["task"] for result in results):
        lines += [
            f"## {TASKS[task].label}",
            "",
            "| policy | rate | seeds | loss | above dense | anchor | MB per step |",
        ]
        lines += ["|---|---|---|---|---|---|---|"]
        of_task = [result for result in results if result["task"] == task]
        dense = None
        for label in (label for label in CONTESTANTS if any(one["label"] == label for one in of_task)):
            mine = [result for result in of_task if result["label"] == label]
            rate = min(mine, key=lambda result: result["loss"])["lr_factor"]
            best = [result for result in mine if result["lr_factor"] == rate]
            loss = fmean(result["loss"] for result in best)
            dense = loss if label == "dense" else dense
            above = "" if dense is None else f"{100 * (loss / dense - 1):+.1f} %"
            anchor, megabytes = fmean(r["anchor_loss"] for r in best), best[0]["sent_bytes_per_step"] / 1e6
            lines.append(
                f"| {label} | × {rate:g} | {len(best)} | {loss:.4f} | {above} | {anchor:.4f} | {megabytes:.3f} |"
            )
        lines.append("")
    return "\n".join(lines)
