"""Charts of a plan, each a plotly figure of the plan's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from thinwire.observe.html import figures

PlanJson = Mapping[str, Any]

_MARGIN = 30  # how far the picture goes beyond its points, as a factor
_ROOFS = (
    ("compute", "compute roof", "dot"),
    ("memory", "memory roof", "dash"),
    ("achieved", "the model alone", "solid"),
)


def roofline(plan: PlanJson) -> Any:
    """Attainable FLOP/s over FLOPs per byte on the wire: a slope (the network) under flat roofs."""
    figure = figures._figure("FLOPs per byte on the wire", "FLOP/s of one rank")
    lines = plan["roofline"]
    intensities = [line["flops"] / line["wire_bytes"] for line in lines.values()]
    low, high = min(intensities) / _MARGIN, max(intensities) * _MARGIN
    first = next(iter(lines.values()))
    for name, label, dash in _ROOFS:
        figure.add_trace(_line([low, high], [first[name]] * 2, label, figures.FLOOR_COLOUR, dash, mode="lines"))
    colours = (figures.DENSE_COLOUR, *figures.OTHER_COLOURS)
    for (spec, line), intensity, colour in zip(lines.items(), intensities, colours, strict=False):
        rate, roof = line["network_bytes_per_s"], min(line["compute"], line["memory"])
        x = sorted({low, min(max(roof / rate, low), high), high})  # straight between these, in logarithms
        y = [min(rate * value, roof) for value in x]
        figure.add_trace(_line(x, y, f"ceiling with {spec}", colour, mode="lines"))
        reached = min(rate * intensity, line["achieved"])
        figure.add_trace(
            go.Scatter(x=[intensity], y=[reached], mode="markers", name=spec, marker={"color": colour, "size": 12})
        )
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure


def timeline(plan: PlanJson) -> Any:
    """The predicted step, drawn like a measured one."""
    return figures.timeline([{"rank": 0, "step": 0, "spans": list(plan["spans"])}])


def sweep(plan: PlanJson) -> Any:
    """Predicted step over the link's rate: the lowest line wins."""
    figure = figures._figure("link rate (Mbit/s of payload)", "predicted step (s)")
    rows = plan["sweep"]
    x = [row["bits_per_s"] / 1e6 for row in rows]
    figure.add_trace(_line(x, [row["floor_s"] for row in rows], "floor", figures.FLOOR_COLOUR, dash="dot"))
    bright = iter(figures.OTHER_COLOURS * 20)
    for spec in rows[0]["step_s"]:
        colour = figures.DENSE_COLOUR if spec == "dense" else next(bright)
        figure.add_trace(_line(x, [row["step_s"][spec] for row in rows], spec, colour))
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure


def _line(
    x: list[float], y: list[float], name: str, colour: str, dash: str = "solid", *, mode: str = "lines+markers"
) -> Any:
    return go.Scatter(x=x, y=y, name=name, mode=mode, line={"color": colour, "dash": dash})
