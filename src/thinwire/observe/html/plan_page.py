"""The page of a plan: the candidates, the roofline, the predicted step, and who wins on which link."""

from __future__ import annotations

from html import escape
from pathlib import Path

from plotly.offline import get_plotlyjs

from thinwire.observe.html import plan_figures
from thinwire.observe.html.page import REDRAW, STYLE, _card, _table
from thinwire.observe.html.plan_figures import PlanJson

_COLUMNS = ("compress", "fuse", "step ms", "× floor", "× dense", "MB sent", "messages", "MB kept", "error", "verdict")


def write_plan_page(plan: PlanJson, path: Path) -> None:
    """Write the page of a plan, given as ``Plan.to_json()``; it works offline."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>thinwire plan</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>thinwire plan</h1>{_body(plan)}{REDRAW}</body></html>\n",
        encoding="utf-8",
    )


def _body(plan: PlanJson) -> str:
    facts = " · ".join(f"{name}: {value}" for name, value in plan["facts"].items())
    reasons = "".join(f"<p>{escape(reason)}</p>" for reason in plan["reasons"])
    return (
        f"<h2>{escape(plan['compress'])}, fuse={escape(plan['fuse'])}: {1e3 * plan['step_s']:.1f} ms predicted</h2>"
        f'<p class="note">{plan["world_size"]} ranks · quality {escape(plan["quality"])} · {escape(facts)} · '
        f"{escape(plan['date'])}</p>{reasons}"
        f'<div class="card scroll">{_table(_COLUMNS, _rows(plan))}</div><div class="grid">{_charts(plan)}</div>'
    )


def _rows(plan: PlanJson) -> list[list[str]]:
    return [
        [
            one["compress"],
            one["fuse"],
            f"{1e3 * one['step_s']:.1f}",
            f"{one['step_s'] / plan['floor_s']:.2f}",
            f"{plan['dense_s'] / one['step_s']:.2f}",
            f"{one['wire_bytes'] / 1e6:.2f}",
            str(one["messages"]),
            f"{one['memory_bytes'] / 1e6:.1f}",
            f"{one['relative_error']:.1e}",
            one["verdict"],
        ]
        for one in plan["candidates"]
    ]


def _charts(plan: PlanJson) -> str:
    """Those for which the plan has numbers."""
    charts = []
    if plan["roofline"]:
        turning = plan["roofline"]["dense"]
        note = (
            f"The binding ceiling of dense is the {turning['binding']}. Its network would keep up with the model from a "
            f"local batch of {turning['turning_batch']:.0f} (now {turning['batch']}) or at "
            f"{8 * turning['turning_bytes_per_s'] / 1e6:.0f} Mbit/s on."
        )
        charts.append(_card("Roofline", note, plan_figures.roofline(plan)))
    if plan["spans"]:
        note = (
            "The predicted step: training on top, the communication thread below it, messages on the wire below that."
        )
        charts.append(_card("Timeline", note, plan_figures.timeline(plan)))
    if plan["sweep"]:
        charts.append(_card("Which method wins where", _winners(plan), plan_figures.sweep(plan)))
    return "".join(charts)


def _winners(plan: PlanJson) -> str:
    parts: list[str] = []
    previous = ""
    for row in plan["sweep"]:
        if row["winner"] != previous:
            previous = row["winner"]
            parts.append(f"from {row['bits_per_s'] / 1e6:g} Mbit/s: {previous}")
    return "Predicted winners: " + "; ".join(parts) + "."
