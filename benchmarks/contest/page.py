"""The contest as pictures: ``contest.html``, which works offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from benchmarks.contest.analysis import predictions
from benchmarks.contest.cell import Cell
from benchmarks.contest.lineup import AUTO, FLOOR, STOCK_DDP
from benchmarks.contest.summary import in_order
from plotly.offline import get_plotlyjs

from thinwire.observe.html import figures
from thinwire.observe.html.page import REDRAW, STYLE, _card

COLOURS = ("#2b9a66", "#9a4fc4", "#c43d5d", "#8a6d1f", "#3aa6b9", "#7a8b2f", "#d17fb5")
NAMED_COLOURS = {FLOOR: figures.FLOOR_COLOUR, STOCK_DDP: figures.DENSE_COLOUR, AUTO: "#e4762f"}


def write_page(cells: Sequence[Cell], path: Path) -> None:
    """One panel per model, and predicted against measured over all."""
    cells = in_order(cells)
    colours = contestant_colours(cells)
    note = "Median of the turns; bars from the first to the last decile. Lower is better, nothing is faster than the floor."
    panels = [
        _card(f"{model}: step by link rate", note, step_times([c for c in cells if c.model == model], colours))
        for model in dict.fromkeys(cell.model for cell in cells)
    ]
    note = "On the line: as predicted. Below it: it took longer than predicted."
    panels.append(_card("Predicted against measured", note, predicted_and_measured(cells, colours)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>thinwire contest</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f'<body><h1>thinwire contest</h1><div class="grid">{"".join(panels)}</div>{REDRAW}</body></html>\n',
        encoding="utf-8",
    )


def contestant_colours(cells: Sequence[Cell]) -> dict[str, str]:
    """The same in every panel."""
    names = dict.fromkeys(score.contestant for cell in cells for score in cell.scores)
    bright = iter(COLOURS * (1 + len(names) // len(COLOURS)))
    return {name: NAMED_COLOURS.get(name) or next(bright) for name in names}


def step_times(cells: Sequence[Cell], colours: dict[str, str]) -> Any:
    """A line per contestant over the rates of one model; the rates are at equal distances, since one has no number."""
    figure = figures._figure("link rate", "seconds per step")
    for name, colour in colours.items():
        found = [(cell.rate, score) for cell in cells if (score := cell.score(name)) is not None]
        spreads_s = [score.spread_s for _, score in found]
        figure.add_trace(
            go.Scatter(
                x=[rate for rate, _ in found],
                y=[score.median_s for _, score in found],
                error_y={
                    "array": [
                        high_s - score.median_s for (_, score), (_, high_s) in zip(found, spreads_s, strict=True)
                    ],
                    "arrayminus": [
                        score.median_s - low_s for (_, score), (low_s, _) in zip(found, spreads_s, strict=True)
                    ],
                    "thickness": 1,
                },
                name=name,
                mode="lines+markers",
                line={
                    "color": colour,
                    "dash": "dot" if name == FLOOR else "solid",
                    "width": 4 if name == AUTO else 1.5,
                },
            )
        )
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=[cell.rate for cell in cells])
    figure.update_yaxes(type="log")
    figure.update_layout(height=520)
    return figure


def predicted_and_measured(cells: Sequence[Cell], colours: dict[str, str]) -> Any:
    """A point per contestant and cell."""
    figure = figures._figure("measured step (s)", "predicted step (s)")
    found = predictions(cells)
    seconds = [value for one in found for value in (one.predicted_s, one.measured_s)]
    if seconds:
        ends = [min(seconds), max(seconds)]
        figure.add_trace(go.Scatter(x=ends, y=ends, mode="lines", name="exact", line={"color": figures.FLOOR_COLOUR}))
    for name in dict.fromkeys(one.contestant for one in found):
        own = [one for one in found if one.contestant == name]
        figure.add_trace(
            go.Scatter(
                x=[one.measured_s for one in own],
                y=[one.predicted_s for one in own],
                text=[f"{one.model} at {one.rate}" for one in own],
                name=name,
                mode="markers",
                marker={"color": colours[name], "size": 9},
            )
        )
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    figure.update_layout(height=520)
    return figure
