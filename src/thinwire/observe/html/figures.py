"""The report's charts, each a plotly figure of one contest."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go

from thinwire.observe.events import Event
from thinwire.observe.runs import Contest, Point, Run

FLOOR_COLOUR = "#8a8f98"
DENSE_COLOUR = "#2f6fd0"
OTHER_COLOURS = ("#e4762f", "#2b9a66", "#9a4fc4", "#c43d5d", "#8a6d1f")
HEIGHT_PX = 360


def colours(contest: Contest) -> list[str]:
    """One colour per run: grey for the floor, blue for dense, bright ones for what is being shown."""
    bright = iter(OTHER_COLOURS * (1 + len(contest.runs) // len(OTHER_COLOURS)))
    return [
        FLOOR_COLOUR if run.is_floor else DENSE_COLOUR if run is contest.dense else next(bright) for run in contest.runs
    ]


def loss_over_time(contest: Contest) -> Any:
    """Loss against seconds of training: what a user waits for."""
    return _loss_figure(contest, lambda point: point.elapsed_s, "training time (s)")


def loss_over_steps(contest: Contest) -> Any:
    """Loss against steps: what compression costs in quality."""
    return _loss_figure(contest, lambda point: point.step + 1, "steps")


def _loss_figure(contest: Contest, position: Callable[[Point], float], x_title: str) -> Any:
    figure = _figure(x_title, "loss (nats per byte)")
    for run, colour in zip(contest.runs, colours(contest), strict=True):
        if run.is_floor:
            continue  # its ranks learn apart from each other: its loss means nothing here
        training, evaluations = run.training_loss(), run.evaluations()
        figure.add_trace(_line(training, position, run.label, colour, faint=True))
        figure.add_trace(_line(evaluations, position, run.label, colour, faint=False))
    return figure


def _line(points: list[Point], position: Callable[[Point], float], name: str, colour: str, faint: bool) -> Any:
    return go.Scatter(
        x=[position(point) for point in points],
        y=[point.loss for point in points],
        name=name,
        mode="lines" if faint else "lines+markers",
        opacity=0.35 if faint else 1.0,
        showlegend=not faint,
        legendgroup=name,  # a click on a run hides both of its lines
        line={"color": colour, "width": 1.2 if faint else 2.5},
        hovertemplate=f"%{{y:.3f}} at %{{x:.1f}}<extra>{name}, {'training' if faint else 'evaluation'}</extra>",
    )


def step_times(contest: Contest) -> Any:
    """Seconds of every step on every rank."""
    figure = _figure("step time (s)", "")
    for run, colour in zip(contest.runs, colours(contest), strict=True):
        figure.add_trace(
            go.Box(
                x=run.step_seconds(),
                name=run.label,
                boxpoints="all",
                jitter=0.6,
                pointpos=0,
                marker={"color": colour, "size": 3, "opacity": 0.35},
                line={"color": colour, "width": 1.5},
            )
        )
    figure.update_layout(showlegend=False)
    figure.update_xaxes(rangemode="tozero")
    return _first_on_top(figure)


def breakdown(contest: Contest) -> Any:
    """The median step as compute (what the floor takes) and the rest, which the network and compression add."""
    floor_s = statistics.median(contest.floor.step_seconds()) if contest.floor else None
    runs = [run for run in contest.runs if run.step_seconds()]
    medians_s = [statistics.median(run.step_seconds()) for run in runs]
    compute_s = [median_s if floor_s is None else min(median_s, floor_s) for median_s in medians_s]
    added_s = [median_s - base_s for median_s, base_s in zip(medians_s, compute_s, strict=True)]
    figure = _figure("seconds of the median step", "")
    first = "whole step (no floor in this run)" if floor_s is None else "compute (the floor)"
    for name, values, colour in ((first, compute_s, FLOOR_COLOUR), ("waiting and compression", added_s, "#d9534f")):
        figure.add_trace(_bar(runs, values, name, colour, [f"{value:.3f} s" if value else "" for value in values]))
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    return _first_on_top(figure)


def sent_bytes(contest: Contest) -> Any:
    """Megabytes that one host sends in one step."""
    figure = _figure("MB sent per host and step", "")
    megabytes = [0.0 if run.is_floor else (run.mean_per_step("sent_bytes") or 0.0) / 1e6 for run in contest.runs]
    figure.add_trace(
        _bar(list(contest.runs), megabytes, "sent", colours(contest), [f"{value:.2f} MB" for value in megabytes])
    )
    figure.update_traces(textposition="outside")
    figure.update_layout(showlegend=False)
    figure.update_xaxes(range=[0, 1.35 * max(megabytes, default=0.0) or 1.0])  # space for the texts
    return _first_on_top(figure)


ACTIVITIES = {  # activity: row below its rank's name, colour
    "backward": ("training", "#8a8f98"),
    "wait": ("training", "#d9534f"),
    "encode": ("coding", "#e4762f"),
    "decode": ("coding", "#9a4fc4"),
    "wire": ("wire", "#2f6fd0"),
}


def error_ledger(events: list[Event]) -> Any:
    """Compression error against gradient noise, both relative to the mean gradient."""
    figure = _figure("step", "‖error‖² / ‖mean gradient‖²")
    steps = [event["step"] + 1 for event in events]
    for field, name in (("noise", "gradient noise"), ("compression", "compression")):
        figure.add_trace(go.Scatter(x=steps, y=[event[field] for event in events], name=name, mode="lines+markers"))
    figure.update_yaxes(type="log")
    return figure


def timeline(traces: list[Event]) -> Any:
    """One step as a timeline: three rows per rank."""
    figure = _figure("milliseconds since the first gradient", "")
    for activity, (row, colour) in ACTIVITIES.items():
        spans = [(t["rank"], span) for t in traces for span in t["spans"] if span["activity"] == activity]
        figure.add_trace(
            go.Bar(
                y=[f"rank {rank} {row}" for rank, _ in spans],
                x=[(span["end_s"] - span["start_s"]) * 1e3 for _, span in spans],
                base=[span["start_s"] * 1e3 for _, span in spans],
                customdata=[[span["group"], span["sent_bytes"] / 1e3] for _, span in spans],
                name=activity,
                orientation="h",
                marker={"color": colour, "opacity": 0.75},
                hovertemplate="group %{customdata[0]}: %{x:.1f} ms, %{customdata[1]:.0f} kB<extra>"
                + activity
                + "</extra>",
            )
        )
    rows = [f"rank {trace['rank']} {row}" for trace in traces for row in ("training", "coding", "wire")]
    figure.update_layout(barmode="overlay", height=max(HEIGHT_PX, 26 * len(rows) + 120))
    figure.update_yaxes(categoryorder="array", categoryarray=rows)
    return _first_on_top(figure)


def _bar(runs: list[Run], values: list[float], name: str, colour: str | list[str], texts: list[str]) -> Any:
    return go.Bar(
        y=[run.label for run in runs],
        x=values,
        name=name,
        orientation="h",
        marker={"color": colour},
        text=texts,
        textposition="auto",
        textangle=0,
        hovertemplate="%{x:.3f}<extra>" + name + "</extra>",
    )


def _first_on_top(figure: Any) -> Any:
    figure.update_yaxes(autorange="reversed")
    return figure


def _figure(x_title: str, y_title: str) -> Any:
    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        height=HEIGHT_PX,
        margin={"l": 10, "r": 20, "t": 10, "b": 10},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        xaxis={"title": {"text": x_title}, "automargin": True},
        yaxis={"title": {"text": y_title}, "automargin": True},
    )
    return figure
