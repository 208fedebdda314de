"""What the cells say: how exact predictions are, what ``auto`` loses against the best fixed setting, and against DDP."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.contest.cell import Cell, Score
from benchmarks.contest.lineup import AUTO, FLOOR, SAFE_SPECS, STOCK_DDP, ours

from thinwire.observe.summary import deciles


@dataclass(frozen=True)
class Prediction:
    """Predicted against measured, of one contestant in one cell."""

    model: str
    rate: str
    contestant: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Below zero: it took longer than predicted."""
        return self.predicted_s / self.measured_s - 1


def predictions(cells: Iterable[Cell]) -> list[Prediction]:
    """Of everybody who communicates and has a prediction."""
    return [
        Prediction(cell.model, cell.rate, score.contestant, score.predicted_s, score.median_s)
        for cell in cells
        for score in cell.scores
        if score.predicted_s is not None and score.contestant != FLOOR
    ]


@dataclass(frozen=True)
class Errors:
    """Of many predictions: the median and the worst absolute error, and the median error with its sign."""

    count: int
    median: float
    worst: Prediction
    bias: float


def errors_of(given: Sequence[Prediction]) -> Errors | None:
    """Summed up; None where nothing was predicted."""
    if not given:
        return None
    return Errors(
        count=len(given),
        median=statistics.median(abs(one.error) for one in given),
        worst=max(given, key=lambda one: abs(one.error)),
        bias=statistics.median(one.error for one in given),
    )


def errors_by_contestant(given: Sequence[Prediction]) -> dict[str, Errors]:
    """In the order in which contestants first appear."""
    names = dict.fromkeys(one.contestant for one in given)
    summed = {name: errors_of([one for one in given if one.contestant == name]) for name in names}
    return {name: errors for name, errors in summed.items() if errors is not None}


@dataclass(frozen=True)
class Comparison:
    """``auto`` against another in one cell: its time divided by the other's.

    Both took turns, so each round has a ratio of its own, free of the machine's drift from round to round.

    Args:
        ratio: the median over the rounds.
        low: first decile of the rounds; ``high`` the last.
    """

    model: str
    rate: str
    other: str
    ratio: float
    low: float
    high: float

    def exceeds(self, limit: float) -> bool:
        """Whether ``auto`` takes more than ``limit`` (0.03: three percent) longer."""
        return self.ratio > 1 + limit

    def clearly_exceeds(self, limit: float) -> bool:
        """Whether it does in nearly every round."""
        return self.low > 1 + limit


def compare(cell: Cell, other: Score | None) -> Comparison | None:
    """``auto`` against ``other``; None if one of them did not take part."""
    auto = cell.score(AUTO)
    if auto is None or other is None:
        return None
    # Whoever is far from ``auto`` takes part in the first rounds only.
    ratios = [mine_s / its_s for mine_s, its_s in zip(auto.turns_s, other.turns_s, strict=False)]
    middle = statistics.median(ratios)
    low, high = deciles(ratios)
    return Comparison(
        cell.model,
        cell.rate,
        other.contestant,
        middle,
        middle if low is None else low,
        middle if high is None else high,
    )


def best_fixed(cell: Cell) -> Score | None:
    """The fastest setting of the quality class of ``auto``. (The least of noisy medians is a little too good.)"""
    scores = [score for score in (cell.score(ours(spec)) for spec in SAFE_SPECS) if score is not None]
    return min(scores, key=lambda score: score.median_s, default=None)


def regrets(cells: Iterable[Cell]) -> list[Comparison]:
    """``auto`` against the best fixed setting of each cell."""
    return _present(compare(cell, best_fixed(cell)) for cell in cells)


def against_ddp(cells: Iterable[Cell]) -> list[Comparison]:
    """``auto`` against stock DDP."""
    return _present(compare(cell, cell.score(STOCK_DDP)) for cell in cells)


def against_floor(cells: Iterable[Cell]) -> list[Comparison]:
    """``auto`` against no communication at all."""
    return _present(compare(cell, cell.score(FLOOR)) for cell in cells)


def planning_s(cells: Iterable[Cell]) -> list[float]:
    """How long training stood still for each first plan."""
    return [float(cell.plans[0]["facts"]["planning_s"]) for cell in cells if cell.plans]


def _present(found: Iterable[Comparison | None]) -> list[Comparison]:
    return [one for one in found if one is not None]
