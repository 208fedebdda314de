"""The HTML report: one file that needs no network, with everything a run measured."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from thinwire.observe.html import figures
from thinwire.observe.runs import Contest, Run
from thinwire.observe.summary import COLUMNS, format_cells, summarise

STYLE = """
:root { color: #1c2024; background: #f6f7f9; font-family: system-ui, sans-serif; line-height: 1.45; }
body { max-width: 1180px; margin: 0 auto; padding: 24px; }
h1 { font-size: 1.6rem; margin: 0 0 4px; } h2 { font-size: 1.25rem; margin: 24px 0 8px; }
h3 { font-size: 1rem; margin: 0; }
p { margin: 4px 0 12px; } .note { color: #60646c; font-size: .9rem; }
.grid { display: grid; gap: 16px; margin: 16px 0;
  grid-template-columns: repeat(auto-fit, minmax(min(520px, 100%), 1fr)); }
.card { background: #fff; border: 1px solid #e1e4e8; border-radius: 10px; padding: 14px 16px; min-width: 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 7px 10px; border-bottom: 1px solid #edeff2; white-space: nowrap; }
th { color: #60646c; font-weight: 600; font-size: .85rem; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; } tr:last-child td { border-bottom: 0; }
pre { background: #f3f4f6; border-radius: 6px; padding: 10px; overflow-x: auto; font-size: .8rem; }
summary { cursor: pointer; }
"""

# Charts are drawn while the page is still being laid out; once it is, they have to take the width they really got.
REDRAW = '<script>addEventListener("load", () => dispatchEvent(new Event("resize")))</script>'

CHARTS = (
    (
        "Loss over time",
        "Further left is better. Thick: evaluation, thin: training. Start-up and evaluation take no time here.",
        figures.loss_over_time,
    ),
    (
        "Loss over steps",
        "Thick: evaluation, thin: training. Curves that lie on each other: sending less cost nothing.",
        figures.loss_over_steps,
    ),
    ("Step times", "Every step of every host; the box holds the middle half.", figures.step_times),
    (
        "Where the step goes",
        "What a step takes above the floor is time the network and compression could not hide.",
        figures.breakdown,
    ),
    ("Bytes", "What one host sends per step, averaged over steps and hosts.", figures.sent_bytes),
)

FLOOR_NOTE = (
    "The floor runs the same computation with no exchange at all: its step time is the best any method can reach. "
    "Its hosts learn apart from each other, so its loss is of no interest and is not shown."
)


def write_html(contests: Sequence[Contest], path: Path) -> None:
    """Write the report of ``contests`` to ``path``; it works offline."""
    body = "".join(_contest(contest) for contest in contests)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>thinwire report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>thinwire report</h1>{body}{REDRAW}</body></html>\n",
        encoding="utf-8",
    )


def _contest(contest: Contest) -> str:
    charts = "".join(_card(title, note, draw(contest)) for title, note, draw in CHARTS)
    note = f'<p class="note">{escape(FLOOR_NOTE)}</p>' if contest.floor else ""
    return (
        f"<h2>{escape(contest.directory.name)}</h2><p>{escape(describe(contest))}</p>"
        f'<div class="card scroll">{_summary_table(contest)}</div>{note}'
        f'<div class="grid">{charts}{_seconds_card(contest)}{_timelines(contest)}{_ledgers(contest)}</div>{_details(contest)}'
    )


def describe(contest: Contest) -> str:
    """One sentence on what was run and where, out of the first header."""
    header = contest.runs[0].header
    workload = header.get("settings", {}).get("workload", {})
    parts = [str(header.get("settings", {}).get("network") or f"{header['world_size']} hosts")]
    if parameters := header.get("parameters"):
        parts.append(f"{parameters / 1e6:.1f} M parameters")
    parts += [f"{name} {workload[name]}" for name in ("model", "steps", "batch", "seq", "seed") if name in workload]
    parts += [f"{name} {version}" for name, version in header.get("versions", {}).items()]
    return " · ".join([*parts, f"sent bytes: {header.get('sent_bytes_from', 'as reported')}"])


def _summary_table(contest: Contest) -> str:
    return _table(COLUMNS, [format_cells(row) for row in summarise(contest)])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    headings = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{headings}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _card(title: str, note: str, figure: Any) -> str:
    chart = figure.to_html(
        full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True}
    )
    return f'<div class="card"><h3>{escape(title)}</h3><p class="note">{escape(note)}</p>{chart}</div>'


def _timelines(contest: Contest) -> str:
    """One traced step of every run that has one."""
    note = (
        "What each rank did when: training on top, the communication thread below it, messages on the wire below that."
    )
    traced = [(run, run.last_traces()) for run in contest.runs]
    return "".join(
        _card(f"One step of {run.label} (step {traces[0]['step']})", note, figures.timeline(traces))
        for run, traces in traced
        if traces
    )


def _ledgers(contest: Contest) -> str:
    """What compression loses against the noise, for the runs that have an error ledger."""
    note = "Both of the mean over the ranks. An error far below the noise does no harm."
    kept = [(run, [event for event in run.ranks[0] if event["kind"] == "ledger"]) for run in contest.runs]
    return "".join(
        _card(f"Errors of {run.label}", note, figures.error_ledger(events)) for run, events in kept if events
    )


SECONDS = (
    ("wait_s", "waited for the network"),
    ("encode_s", "compressing"),
    ("wire_s", "on the wire"),
    ("decode_s", "decompressing"),
)


def _seconds_card(contest: Contest) -> str:
    """thinwire's own account of its seconds, for the runs that have one."""
    rows = [_seconds_row(run) for run in contest.runs if run.mean_per_step("wait_s") is not None]
    if not rows:
        return ""
    note = "Mean milliseconds per step. Only the first is time in which training waited; the rest overlaps with it."
    table = _table(["run", *(title for _, title in SECONDS)], rows)
    return f'<div class="card"><h3>thinwire\'s account</h3><p class="note">{note}</p>{table}</div>'


def _seconds_row(run: Run) -> list[str]:
    means_s = (run.mean_per_step(field) for field, _ in SECONDS)
    return [run.label, *("–" if mean_s is None else f"{mean_s * 1e3:.1f}" for mean_s in means_s)]


def _details(contest: Contest) -> str:
    explained = [(run.label, _explanation(run)) for run in contest.runs if run.header.get("explanation")]
    return "".join(
        f"<details><summary>What {escape(label)} did</summary><pre>{escape(text)}</pre></details>"
        for label, text in explained
    )


def _explanation(run: Run) -> str:
    """What the run said of itself at first, and of every plan it made."""
    return "\n\n".join(str(event["explanation"]) for event in (run.header, *run.plans()))
