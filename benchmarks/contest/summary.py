"""The contest in words and tables: ``summary.md``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.contest import analysis
from benchmarks.contest.analysis import Comparison, Errors
from benchmarks.contest.cell import Cell
from benchmarks.contest.lineup import MODELS, RATES

from thinwire.lab import parse_rate

MEDIAN_ERROR, WORST_ERROR = 0.10, 0.25
REGRET, SLOWER_THAN_DDP = 0.05, 0.03
GPT, GPT_RATE, TIMES_FLOOR = "small", "200mbit", 1.08
PLANNING_S = 10.0


def in_order(cells: Iterable[Cell]) -> list[Cell]:
    """By model, then from slow links to fast ones; unshaped ones last."""
    return sorted(cells, key=lambda cell: (cell.model, parse_rate(cell.rate) or float("inf")))


def summary(cells: Sequence[Cell]) -> str:
    """All tables."""
    cells = in_order(cells)
    if not cells:
        return "# Contest\n\nNo cell is done yet.\n"
    parts = [_heading(cells), _goals(cells), _errors(cells), _auto(cells), *_step_times(cells)]
    return "\n\n".join(parts) + "\n"


def _heading(cells: Sequence[Cell]) -> str:
    dates = sorted(cell.facts.get("date", "") for cell in cells)
    loads = sorted(float(cell.facts.get("load_before", "nan")) for cell in cells)
    models = ", ".join(dict.fromkeys(f"{cell.model} ({cell.parameters / 1e6:.1f} M)" for cell in cells))
    missing = {(model, rate) for model in MODELS for rate in RATES} - {(cell.model, cell.rate) for cell in cells}
    return (
        f"# Contest\n\n{len(cells)} cell{'s' * (len(cells) > 1)} on {cells[0].hosts} hosts ({len(missing)} of the "
        f"{len(MODELS) * len(RATES)} cells of a whole contest are missing); "
        f"{models}; {dates[0]} to {dates[-1]}; load before a cell {loads[0]:.1f} to {loads[-1]:.1f}.\n"
        "A time is the median of its turns (the mean step of a turn); ratios are medians over rounds, with the first and "
        "last decile."
    )


def _goals(cells: Sequence[Cell]) -> str:
    rows = [*_error_goals(cells), *_ratio_goals(cells)]
    planning_s = analysis.planning_s(cells)
    if planning_s:
        most_s = max(planning_s)
        rows.append(["longest planning", f"under {PLANNING_S:.0f} s", f"{most_s:.1f} s", _met(most_s < PLANNING_S)])
    return "## Goals\n\n" + table(["goal", "wanted", "measured", "met"], rows)


def _error_goals(cells: Sequence[Cell]) -> list[list[str]]:
    errors = analysis.errors_of(analysis.predictions(cells))
    if errors is None:
        return []
    worst = abs(errors.worst.error)
    where = f"{errors.worst.contestant}, {errors.worst.model} at {errors.worst.rate}"
    return [
        [
            f"prediction error, median of {errors.count}",
            f"at most {percent(MEDIAN_ERROR)}",
            percent(errors.median),
            _met(errors.median <= MEDIAN_ERROR),
        ],
        [
            "prediction error, worst",
            f"at most {percent(WORST_ERROR)}",
            f"{percent(worst)} ({where})",
            _met(worst <= WORST_ERROR),
        ],
    ]


def _ratio_goals(cells: Sequence[Cell]) -> list[list[str]]:
    gpt = [cell for cell in cells if (cell.model, cell.rate) == (GPT, GPT_RATE)]
    goals = (
        ("regret against the best fixed setting", analysis.regrets(cells), REGRET),
        ("slower than stock DDP", analysis.against_ddp(cells), SLOWER_THAN_DDP),
        (f"above the floor, {GPT} at {GPT_RATE}", analysis.against_floor(gpt), TIMES_FLOOR - 1),
    )
    return [_ratio_goal(name, found, limit) for name, found, limit in goals if found]


def _ratio_goal(name: str, found: Sequence[Comparison], limit: float) -> list[str]:
    worst = max(found, key=lambda one: one.ratio)
    over = [one for one in found if one.exceeds(limit)]
    clear = sum(one.clearly_exceeds(limit) for one in over)
    measured = (
        f"worst {signed(worst.ratio - 1)} ({worst.model} at {worst.rate}); over in {len(over)} of {len(found)} cells"
    )
    measured += f", in {clear} of them in nearly every round" if over else ""
    return [name, f"at most {percent(limit)} in every cell", measured, _met(not over)]


def _errors(cells: Sequence[Cell]) -> str:
    found = analysis.errors_by_contestant(analysis.predictions(cells))
    rows = [[name, *_error_row(errors)] for name, errors in found.items()]
    head = ["contestant", "cells", "median error", "with its sign", "worst"]
    return "## Predicted against measured\n\nBelow zero: it took longer than predicted.\n\n" + table(head, rows)


def _error_row(errors: Errors) -> list[str]:
    worst = errors.worst
    where = f"{signed(worst.error)} ({worst.model} at {worst.rate})"
    return [str(errors.count), percent(errors.median), signed(errors.bias), where]


def _auto(cells: Sequence[Cell]) -> str:
    head = ["model", "rate", "plan", "× floor", "best fixed", "× best fixed", "× stock DDP", "planned in"]
    return "## auto\n\n" + table(head, [_auto_row(cell) for cell in cells])


def _auto_row(cell: Cell) -> list[str]:
    plans = " → ".join(f"{plan['compress']} ({plan['fuse']})" for plan in cell.plans)
    floor, best, ddp = (
        next(iter(find([cell])), None) for find in (analysis.against_floor, analysis.regrets, analysis.against_ddp)
    )
    seconds = [f"{one:.1f} s" for one in analysis.planning_s([cell])]
    name = best.other if best else ""
    return [cell.model, cell.rate, plans, _ratio(floor), name, _ratio(best), _ratio(ddp), "".join(seconds)]


def _step_times(cells: Sequence[Cell]) -> list[str]:
    return [
        _model_times([cell for cell in cells if cell.model == model]) for model in dict.fromkeys(c.model for c in cells)
    ]


def _model_times(cells: Sequence[Cell]) -> str:
    names = list(dict.fromkeys(score.contestant for cell in cells for score in cell.scores))
    rows = [[name, *(_time(cell, name) for cell in cells)] for name in names]
    title = f"## Seconds per step: {cells[0].model} ({cells[0].parameters / 1e6:.1f} M parameters)"
    sizes = ", ".join(f"{cell.rate}: {_turns(cell)} × {cell.steps_per_turn}" for cell in cells)
    note = f"Median (first to last decile; predicted). Turns × steps: {sizes}."
    return f"{title}\n\n{note}\n\n" + table(["contestant", *(cell.rate for cell in cells)], rows)


def _turns(cell: Cell) -> str:
    """How many turns there were: of everybody, and of those close to ``auto``."""
    counts = sorted({len(score.turns_s) for score in cell.scores})
    return "-".join(map(str, counts))


def _time(cell: Cell, name: str) -> str:
    score = cell.score(name)
    if score is None:
        return ""
    low_s, high_s = score.spread_s
    predicted = "" if score.predicted_s is None else f"; {score.predicted_s:.3g}"
    return f"{score.median_s:.3g} ({low_s:.3g}-{high_s:.3g}{predicted})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(share: float) -> str:
    """0.031 as "3.1 %"."""
    return f"{100 * share:.1f} %"


def signed(share: float) -> str:
    """0.031 as "+3.1 %"."""
    return f"{100 * share:+.1f} %"


def _ratio(one: Comparison | None) -> str:
    return "" if one is None else f"{one.ratio:.3f} ({one.low:.3f}-{one.high:.3f})"


def _met(met: bool) -> str:
    return "yes" if met else "**no**"
