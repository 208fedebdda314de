"""Loss curves as one SVG file per task, small enough for the docs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from benchmarks.convergence.grid import by_update, topk
from benchmarks.convergence.results import Results
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.train import OURS, STOCK

WIDTH, HEIGHT, MARGIN = 640, 360, 50
LINES = (
    ("dense", STOCK, "#222222", ""),
    ("int4", STOCK, "#1f77b4", ""),
    (by_update(0.05), OURS, "#9467bd", ""),
    (topk(0.05), OURS, "#2ca02c", ""),
    (topk(0.05), STOCK, "#2ca02c", "5 4"),
    (topk(0.01), OURS, "#d62728", ""),
    (topk(0.01), STOCK, "#d62728", "5 4"),
)
Curve = Sequence[Sequence[float]]


def write(results: Results, folder: Path) -> list[Path]:
    """One picture for every task that has curves."""
    written = []
    for task in results.tasks():
        curves = []
        for wire, who, colour, dashes in LINES:
            found = results.find(task=task, compress=wire, optimizer=who)
            if found:
                curves.append((f"{wire}, {who} AdamW", found[0]["curve"], colour, dashes))
        if curves:
            path = folder / f"{task}.svg"
            path.write_text(_picture(TASKS[task].label, curves), encoding="utf-8")
            written.append(path)
    return written


def _picture(title: str, curves: list[tuple[str, Curve, str, str]]) -> str:
    last = max(curve[-1][0] for _, curve, _, _ in curves)
    losses = [loss for _, curve, _, _ in curves for _, loss in curve]
    low, high = min(losses), max(losses)

    def place(step: float, loss: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / last
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (loss - low) / max(high - low, 1e-9)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="14">{escape(title)}: evaluation loss by step</text>',
        *_axes(low, high, last),
    ]
    for index, (label, curve, colour, dashes) in enumerate(curves):
        points = " ".join(place(step, loss) for step, loss in curve)
        stroke = f'stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dashes}" fill="none"'
        y = MARGIN + 16 * index
        parts.append(f'<polyline points="{points}" {stroke}/>')
        parts.append(f'<path d="M{WIDTH - 250} {y - 4}h24" {stroke}/>')
        parts.append(f'<text x="{WIDTH - 220}" y="{y}">{escape(label)} ({curve[-1][1]:.3f})</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(low: float, high: float, last: float) -> list[str]:
    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN
    return [
        f'<path d="M{MARGIN} {MARGIN}V{bottom}H{right}" stroke="#888888" fill="none"/>',
        f'<text x="{MARGIN - 6}" y="{bottom}" text-anchor="end">{low:.2f}</text>',
        f'<text x="{MARGIN - 6}" y="{MARGIN + 4}" text-anchor="end">{high:.2f}</text>',
        f'<text x="{right}" y="{bottom + 18}" text-anchor="end">{last:.0f} steps</text>',
    ]
