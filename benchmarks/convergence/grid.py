"""Which runs there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.train import MASKED_SGD, OURS, SGD, STOCK, Run
from benchmarks.convergence.variants import GRAINS, VARIANTS

DENSITIES = (0.1, 0.05, 0.02, 0.01)
SEEDS = (0, 1, 2)
LR_FACTORS = (0.5, 1.0, 2.0)
MAIN_TASK = "gpt1m"  # the one that rates, variants and every selector are tried on
LARGE_TASK = "gpt5m"
ABLATION_TASKS = (MAIN_TASK, "shakespeare")
WARMUP = "topk(density=exp(0.5, 0.05, steps=150), score='update')"  # begins nearly dense: early updates age fastest
CLIP = 0.5
SGD_TASK = "cnn"


def topk(density: float, name: str = "topk") -> str:
    """A sparsifier as text."""
    return f"{name}(density={density})"


def by_update(density: float) -> str:
    """Top-k that ranks by what Adam would make of a gradient."""
    return f"topk(density={density}, score='update')"


def grid(tasks: list[str], steps: int) -> list[Run]:
    """All runs of these tasks, the most telling ones first, each once."""
    small = [name for name in tasks if name != LARGE_TASK]
    runs = [run for name in small for run in _essential(name)]
    runs += [run for name in small for run in _more_seeds(name)]
    runs += [run for name in ABLATION_TASKS[:1] if name in tasks for run in _ablation(name)]
    runs += [run for name in tasks if name == LARGE_TASK for run in _large()]
    runs += [run for name in small for run in _densities(name)]
    runs += [run for name in small for run in _grains(name)]
    runs += [run for name in small for run in _rates(name)]
    if SGD_TASK in tasks:
        runs += _sgd()
    if MAIN_TASK in tasks:
        runs += [*_rates_by_magnitude(), *_clipped()]
    runs += [run for name in ABLATION_TASKS[1:] if name in tasks for run in _ablation(name)]
    runs += [run for name in small for run in _sparsest(name)]
    runs += [run for name in small for run in _selectors(name)]
    return list(dict.fromkeys(replace(run, steps=steps) for run in runs))


def quick_grid(tasks: list[str], steps: int) -> list[Run]:
    """A handful of short runs that touch everything."""
    compare = [("dense", STOCK), ("int4", STOCK), (topk(0.05), STOCK), (topk(0.05), OURS)]
    runs = [Run(task=name, compress=wire, optimizer=who, steps=steps) for name in tasks for wire, who in compare]
    if MAIN_TASK in tasks:
        runs += [Run(task=MAIN_TASK, compress=topk(0.05), optimizer=name, steps=steps) for name in VARIANTS]
        runs += [Run(task=MAIN_TASK, compress=topk(0.05, s), optimizer=OURS, steps=steps) for s in ("adtopk", "bank")]
    return runs


def _essential(name: str) -> Iterator[Run]:
    """Dense, 4-bit, and one density with either optimizer: what the claim is about."""
    yield Run(task=name, compress="dense")
    yield Run(task=name, compress=by_update(0.05), optimizer=OURS)
    yield Run(task=name, compress=by_update(0.05), optimizer=STOCK)
    yield Run(task=name, compress=topk(0.05), optimizer=OURS)
    yield Run(task=name, compress=topk(0.05), optimizer=STOCK)
    yield Run(task=name, compress="int4")
    yield Run(task=name, compress=WARMUP, optimizer=OURS)


def _large() -> Iterator[Run]:
    """The large model takes minutes a run: what the claim is about, and the sparsest."""
    yield Run(task=LARGE_TASK, compress="dense")
    yield Run(task=LARGE_TASK, compress=WARMUP, optimizer=OURS)
    yield Run(task=LARGE_TASK, compress=by_update(0.05), optimizer=OURS)
    yield Run(task=LARGE_TASK, compress=topk(0.05), optimizer=STOCK)
    yield Run(task=LARGE_TASK, compress="int4")
    yield Run(task=LARGE_TASK, compress=by_update(0.01), optimizer=OURS)
    yield Run(task=LARGE_TASK, compress=topk(0.01), optimizer=STOCK)
    yield Run(task=LARGE_TASK, compress=topk(0.05), optimizer=OURS)
    for seed in SEEDS[1:]:
        yield Run(task=LARGE_TASK, compress="dense", seed=seed)
        yield Run(task=LARGE_TASK, compress=WARMUP, optimizer=OURS, seed=seed)
        yield Run(task=LARGE_TASK, compress=by_update(0.05), optimizer=OURS, seed=seed)


def _densities(name: str) -> Iterator[Run]:
    for density in DENSITIES:
        yield Run(task=name, compress=by_update(density), optimizer=OURS)
        for optimizer in (OURS, STOCK):
            yield Run(task=name, compress=topk(density), optimizer=optimizer)


def _selectors(name: str) -> Iterator[Run]:
    for selector in ("adtopk", "bank"):
        for density in DENSITIES:
            for optimizer in (OURS, STOCK):
                yield Run(task=name, compress=topk(density, selector), optimizer=optimizer)


def _more_seeds(name: str) -> Iterator[Run]:
    for seed in SEEDS[1:]:
        yield Run(task=name, compress="dense", seed=seed)
        yield Run(task=name, compress=by_update(0.05), optimizer=OURS, seed=seed)
        yield Run(task=name, compress=WARMUP, optimizer=OURS, seed=seed)
        yield Run(task=name, compress=topk(0.05), optimizer=OURS, seed=seed)
        yield Run(task=name, compress=topk(0.05), optimizer=STOCK, seed=seed)


def _rates(name: str) -> Iterator[Run]:
    """Everybody gets the learning rate that suits it."""
    for factor in LR_FACTORS:
        yield Run(task=name, compress="dense", lr_factor=factor)
        for optimizer in (OURS, *GRAINS):
            yield Run(task=name, compress=by_update(0.05), optimizer=optimizer, lr_factor=factor)


def _rates_by_magnitude() -> Iterator[Run]:
    for factor in LR_FACTORS:
        for optimizer in (OURS, STOCK):
            yield Run(task=MAIN_TASK, compress=topk(0.05), optimizer=optimizer, lr_factor=factor)


def _ablation(task: str) -> Iterator[Run]:
    for name in VARIANTS:
        yield Run(task=task, compress=topk(0.05), optimizer=name)


def _grains(task: str) -> Iterator[Run]:
    """One age for many coordinates, together with the score that ships."""
    for name in GRAINS:
        for seed in SEEDS:
            yield Run(task=task, compress=by_update(0.05), optimizer=name, seed=seed)


def _sparsest(task: str) -> Iterator[Run]:
    """More seeds where sparsifiers lose most."""
    for seed in SEEDS[1:]:
        yield Run(task=task, compress=by_update(0.01), optimizer=OURS, seed=seed)
        yield Run(task=task, compress=topk(0.01, "bank"), optimizer=OURS, seed=seed)
        yield Run(task=task, compress=topk(0.01), optimizer=STOCK, seed=seed)


def _sgd() -> Iterator[Run]:
    """Momentum, left running as in stock SGD or masked."""
    yield Run(task=SGD_TASK, compress="dense", optimizer=SGD)
    for density in (0.05, 0.01):
        for optimizer in (SGD, *MASKED_SGD):
            yield Run(task=SGD_TASK, compress=topk(density), optimizer=optimizer)


def _clipped() -> Iterator[Run]:
    """Clipping acts on what is received; and the other usual choice of beta2."""
    for change in ({"clip": CLIP}, {"beta2": 0.95}):
        yield Run(task=MAIN_TASK, compress="dense", **change)  # type: ignore[arg-type]
        for optimizer in (OURS, STOCK):
            yield Run(task=MAIN_TASK, compress=topk(0.05), optimizer=optimizer, **change)  # type: ignore[arg-type]


def check_tasks(names: list[str]) -> list[str]:
    """The names, if there are such tasks."""
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ValueError(f"unknown tasks {unknown}; expected some of {list(TASKS)}")
    return names
