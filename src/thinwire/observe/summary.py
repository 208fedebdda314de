"""The figures a comparison closes with: one row per run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from thinwire.observe.runs import Contest, Point, Run

# "As good as dense" allows this much, for dense itself too: without it, a hair's breadth would decide.
LOSS_TOLERANCE = 0.01


@dataclass(frozen=True)
class Row:
    """One run in figures; None where it cannot be known."""

    label: str
    median_step_s: float | None
    low_step_s: float | None  # a tenth of the steps were faster
    high_step_s: float | None  # a tenth of the steps were slower
    times_floor: float | None
    evaluation_loss: float | None
    loss_against_dense: float | None  # 0.01 = one percent above
    sent_bytes_per_step: float | None
    training_s: float
    dense_loss_after_s: float | None
    is_floor: bool
    is_dense: bool
    finished: bool


def summarise(contest: Contest) -> list[Row]:
    """Return one row per run, in the order they ran."""
    floor_s = statistics.median(contest.floor.step_seconds()) if contest.floor else None
    dense_losses = contest.dense.evaluations() if contest.dense and contest.dense.finished else []
    return [_row(run, floor_s, dense_losses[-1].loss if dense_losses else None) for run in contest.runs]


def _row(run: Run, floor_s: float | None, dense_loss: float | None) -> Row:
    seconds = run.step_seconds()
    median_s = statistics.median(seconds) if seconds else None
    low_s, high_s = deciles(seconds)
    evaluations = [] if run.is_floor else run.evaluations()
    loss = evaluations[-1].loss if evaluations else None
    return Row(
        label=run.label,
        median_step_s=median_s,
        low_step_s=low_s,
        high_step_s=high_s,
        times_floor=median_s / floor_s if median_s and floor_s else None,
        evaluation_loss=loss,
        loss_against_dense=loss / dense_loss - 1 if loss is not None and dense_loss else None,
        sent_bytes_per_step=run.mean_per_step("sent_bytes"),
        training_s=run.training_s(),
        dense_loss_after_s=None if dense_loss is None else time_to_loss(evaluations, dense_loss * (1 + LOSS_TOLERANCE)),
        is_floor=run.is_floor,
        is_dense=run.is_dense,
        finished=run.finished,
    )


def deciles(values: list[float]) -> tuple[float | None, float | None]:
    """The first and the last decile; None for fewer than two values."""
    if len(values) < 2:
        return None, None
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[-1]


def time_to_loss(points: list[Point], target: float) -> float | None:
    """Seconds of training until the loss first came down to ``target``, on straight lines between the points."""
    for index, point in enumerate(points):
        if point.loss <= target:
            if index == 0:
                return point.elapsed_s
            before = points[index - 1]
            share = (before.loss - target) / (before.loss - point.loss)
            return before.elapsed_s + share * (point.elapsed_s - before.elapsed_s)
    return None


def format_cells(row: Row) -> list[str]:
    """The row as text, one cell per entry of :data:`COLUMNS`; the terminal and the HTML table show the same."""
    return [
        row.label if row.finished else f"{row.label} (stopped early)",
        _step_time(row),
        _or_dash(row.times_floor, "{:.2f} ×"),
        _loss(row),
        "0" if row.is_floor else _or_dash(_megabytes(row.sent_bytes_per_step), "{:.2f}"),
        f"{row.training_s:.0f} s",
        _dense_loss_time(row),
    ]


COLUMNS = (
    "contestant",
    "step time, median (p10–p90)",
    "× floor",
    "eval loss",
    "MB per host and step",
    "training time",
    f"time to dense's final loss + {LOSS_TOLERANCE:.0%}",
)


def headlines(rows: list[Row]) -> list[str]:
    """One sentence per compressed run on what it gained and lost against dense."""
    dense = next((row for row in rows if row.is_dense), None)
    if dense is None or not dense.median_step_s or not dense.sent_bytes_per_step:
        return []
    return [
        _headline(row, dense.median_step_s / row.median_step_s, dense.sent_bytes_per_step / row.sent_bytes_per_step)
        for row in rows
        if not (row.is_floor or row.is_dense) and row.median_step_s and row.sent_bytes_per_step
    ]


def choices(contest: Contest) -> list[str]:
    """One sentence per plan of the runs with ``compress="auto"``."""
    return [
        f"{run.label} chose {plan['compress']} (fuse={plan['fuse']}) after {plan['step']} steps: {plan['step_s']:.3g} s "
        f"predicted, dense {plan['dense_s']:.3g} s, floor {plan['floor_s']:.3g} s."
        for run in contest.runs
        for plan in run.plans()
    ]


def _headline(row: Row, speedup: float, reduction_factor: float) -> str:
    loss = "" if row.loss_against_dense is None else f", evaluation loss {_signed_percent(row.loss_against_dense)}"
    return f"{row.label} against dense: {speedup:.2f} × the speed, 1/{reduction_factor:.0f} of the bytes{loss}."


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _signed_percent(share: float) -> str:
    return f"{round(share, 3) + 0.0:+.1%}"  # adding zero turns a rounded -0.0 into 0.0


def _megabytes(count_bytes: float | None) -> float | None:
    return None if count_bytes is None else count_bytes / 1e6


def _step_time(row: Row) -> str:
    if row.median_step_s is None or row.low_step_s is None or row.high_step_s is None:
        return _or_dash(row.median_step_s, "{:.3f} s")
    return f"{row.median_step_s:.3f} s ({row.low_step_s:.2f}–{row.high_step_s:.2f})"


def _loss(row: Row) -> str:
    if row.is_floor:
        return "n/a"
    if row.evaluation_loss is None or row.loss_against_dense is None or row.is_dense:
        return _or_dash(row.evaluation_loss, "{:.3f}")
    return f"{row.evaluation_loss:.3f} ({_signed_percent(row.loss_against_dense)})"


def _dense_loss_time(row: Row) -> str:
    if row.is_floor:
        return "n/a"
    if row.loss_against_dense is not None and row.dense_loss_after_s is None:
        return "not reached"
    return _or_dash(row.dense_loss_after_s, "{:.0f} s")
