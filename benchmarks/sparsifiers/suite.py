"""The methods of ``python -m benchmarks.convergence --suite sparsifiers``, all at the bytes of one top-k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from benchmarks.convergence.tasks import TASKS, WORKERS, Task
from benchmarks.convergence.train import OURS, STOCK, Run
from benchmarks.sparsifiers.budget import Fitted, depends_on_data, families, wire_bytes
from benchmarks.sparsifiers.fit import fit
from benchmarks.sparsifiers.stream import samples, tensors_of

from thinwire.core import TensorSpec
from thinwire.fusion.prepare import prepare

DEFAULT_TASKS = ("shakespeare", "cnn")
SEEDS = (0, 1, 2)
STEPS = 300
BUDGET = "topk(density=0.02)"
REFERENCES = ("dense", "int4")  # not at equal bytes
# Left out: mstopk and redsync, which choose what topk chooses; gaussiank and sidco's exponential law, estimators like the
# gamma law that is in; adacomp, whose volume is left to the data; randomk, far behind on gradients already; dgc, which sends
# a velocity and needs an optimizer without momentum, so not AdamW.
COMPARED = (
    "topk",
    "adtopk",
    "adtopk, rows only",
    "bank",
    "bank, shared",
    "mipd",
    "sidco, gamma",
    "dct",
    "gtopk",
    "oktopk",
    "acp",
    "powersgd",
    "roundrobin, topk",
    "normgreedy, topk",
    "hypernet, topk",
)
CALIBRATION_STEPS, STEPS_BEFORE = 24, 16


def names() -> list[str]:
    """All methods that can be run; layer selections only where they are registered."""
    known = {family.label for family in families()}
    return [*REFERENCES, *(label for label in COMPARED if label in known)]


def settings(task: Task, wanted: Sequence[str]) -> list[Fitted]:
    """These methods at the budget of this task, references as they are. The same each time it is called."""
    torch.set_num_threads(1)  # sums over threads would round differently, and settings name the runs
    tensors = tensors_of(task)
    budget_bytes = budget_of(task)
    by_label = {family.label: family for family in families() if family.label in wanted}
    varying = any(depends_on_data(family.spec(family.high)) for family in by_label.values())
    taken = list(samples(task, CALIBRATION_STEPS, before=STEPS_BEFORE)) if varying else []
    references = [Fitted(name, name, wire_bytes(name, tensors, WORKERS)) for name in REFERENCES if name in wanted]
    return references + [fit(by_label[label], tensors, budget_bytes, taken) for label in COMPARED if label in by_label]


def grid(methods_by_task: Mapping[str, Sequence[Fitted]], steps: int) -> list[Run]:
    """Every method on every task with every seed, seed by seed: a stopped benchmark has a first table early."""
    runs = []
    for seed in SEEDS:
        for name, methods in methods_by_task.items():
            tensors = tensors_of(TASKS[name])
            for method in methods:
                optimizer = OURS if sends_sparse(method.spec, tensors) else STOCK
                runs.append(Run(task=name, compress=method.spec, optimizer=optimizer, steps=steps, seed=seed))
    return runs


def budget_of(task: Task) -> int:
    """Bytes per rank and step that the methods are fitted to."""
    return wire_bytes(BUDGET, tensors_of(task), WORKERS)


def sends_sparse(spec: str, tensors: Sequence[TensorSpec]) -> bool:
    """Whether updates arrive at different ages, so that the optimizer should know them."""
    compressor = prepare(spec)
    return any(compressor.route(tensor).sparse for tensor in tensors)
