"""Bars as an SVG file, small enough for the docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, LEFT, RIGHT, TOP = 720, 190, 60, 64
BAR, GAP = 9, 8
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c")


def picture(title: str, series: Mapping[str, Mapping[str, float]], form: str = ".3f") -> str:
    """Horizontal bars from zero, one colour per series, labels on the left.

    Args:
        series: by name, values by label; a label that a series lacks has no bar there. Bars below zero have no length.
        form: how values are written.
    """
    labels = list(dict.fromkeys(label for values in series.values() for label in values))
    largest = max((value for values in series.values() for value in values.values()), default=0.0) or 1.0
    row = BAR * len(series) + GAP
    height = TOP + row * len(labels) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="14">{escape(title)}</text>',
        *_legend(list(series)),
    ]
    for index, label in enumerate(labels):
        top = TOP + row * index
        parts.append(
            f'<text x="{LEFT - 8}" y="{top + (row - GAP) / 2 + 4:.0f}" text-anchor="end">{escape(label)}</text>'
        )
        for number, values in enumerate(series.values()):
            if label in values:
                parts += _bar(top + BAR * number, values[label], largest, COLOURS[number % len(COLOURS)], form)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(names: Sequence[str]) -> list[str]:
    parts = []
    for number, name in enumerate(names):
        x = LEFT + 220 * number
        parts.append(f'<rect x="{x}" y="38" width="10" height="10" fill="{COLOURS[number % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 16}" y="47">{escape(name)}</text>')
    return parts


def _bar(top: float, value: float, largest: float, colour: str, form: str) -> list[str]:
    length = (WIDTH - LEFT - RIGHT) * max(value, 0.0) / largest
    return [
        f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR - 1}" fill="{colour}"/>',
        f'<text x="{LEFT + length + 4:.1f}" y="{top + BAR - 1}" font-size="9">{value:{form}}</text>',
    ]
