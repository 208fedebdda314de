"""Rows missing, tensors missing and energy kept, on gradients of real trainings with error feedback.

    python -m benchmarks.sparsifiers.gradients --steps 32 --out runs/gradients

Two models on four simulated workers: the demo's GPT on the source of the standard library, a CNN on Fashion-MNIST. Dense
AdamW trains them, so that all methods get the same gradients. Every method is set to send as many bytes as
``topk(density=0.01)``. Writes tables (results.md), numbers (results.json) and a picture (energy.svg).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks.convergence.data import Unavailable
from benchmarks.convergence.tasks import TASKS, WORKERS, Task
from benchmarks.sparsifiers.budget import Family, Fitted, families, wire_bytes
from benchmarks.sparsifiers.fit import fit
from benchmarks.sparsifiers.report import Measured, write
from benchmarks.sparsifiers.stream import samples, tensors_of
from benchmarks.sparsifiers.studies import EnergyStudy, RowStudy, TensorStudy
from rich.console import Console

DENSITY = 0.01
FUSION_DEGREES = (1, 5, 20, 1_000_000)  # the last stands for all tensors at once
REFERENCES = ("int4",)  # not at equal bytes
DEFAULT_TASKS = ("gpt1m", "cnn")


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32, help="measured steps; means are over their second half")
    parser.add_argument("--before", type=int, default=30, help="steps of training before (default: 30)")
    parser.add_argument("--tasks", nargs="+", default=DEFAULT_TASKS, choices=list(TASKS), metavar="TASK")
    parser.add_argument("--out", type=Path, default=Path("runs/gradients"), help="folder (default: runs/gradients)")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps is {arguments.steps}; expected 2 or more, because means are over the second half")
    torch.set_num_threads(1)
    console, measured = Console(), []
    for name in arguments.tasks:
        try:
            console.print(f"{name}: training and measuring", highlight=False)
            measured.append(measure(TASKS[name], arguments.steps, arguments.before, families()))
        except Unavailable as error:
            console.print(f"[yellow]skipping {name}: {error}[/]")
    console.print(write(measured, arguments.out), markup=False, highlight=False, soft_wrap=True)
    console.print(f"written: {arguments.out}/results.md, results.json, energy.svg", highlight=False)


def measure(task: Task, steps: int, before: int, compared: Sequence[Family]) -> Measured:
    """Everything about one model."""
    tensors, taken = tensors_of(task), list(samples(task, steps, before=before))
    topk, ignored = f"topk(density={DENSITY})", steps // 2
    budget_bytes = wire_bytes(topk, tensors, WORKERS)
    references = [Fitted(f"{spec} (more bytes)", spec, wire_bytes(spec, tensors, WORKERS)) for spec in REFERENCES]
    fitted = [fit(family, tensors, budget_bytes, taken) for family in compared] + references
    rows = RowStudy(tensors, row_specs(), ignored)
    fusion = TensorStudy(tensors, FUSION_DEGREES, topk, ignored)
    energy = EnergyStudy(tensors, fitted, ignored)
    for sample in taken:
        for study in (rows, fusion, energy):
            study.add(sample)
    dense_bytes = wire_bytes("dense", tensors, WORKERS)
    settings = (task.label, before, steps, ignored, DENSITY, budget_bytes, dense_bytes)
    return Measured(*settings, rows.result(), fusion.result(), energy.result())


def row_specs() -> list[str]:
    """Whose missing rows are counted."""
    templates = ("topk(density={})", "adtopk(density={}, interleave=False)", "adtopk(density={})", "bank(density={})")
    return [template.format(DENSITY) for template in templates]


if __name__ == "__main__":
    main()
