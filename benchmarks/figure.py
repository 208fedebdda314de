"""The picture of the README: step time over link rate, from ``benchmarks/results/contest-steps.csv``.

python -m benchmarks.figure           writes docs/assets/step-over-rate.svg
python -m benchmarks.figure --check   exit status 1 where the file differs
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping

from benchmarks.results import ROOT, contest_steps

PATH = ROOT / "docs" / "assets" / "step-over-rate.svg"
MODEL, TITLE = "small", "Seconds per step, GPT of 4.9 M parameters on four hosts"
RATES = {"20mbit": "20", "50mbit": "50", "100mbit": "100", "200mbit": "200", "500mbit": "500", "1gbit": "1000"}
TICKS_S = (0.5, 1, 2, 5, 10)
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 680, 50, 345
LEGEND_X, LEGEND_Y = 392, 76
# Contestant, label, colour, dashes, width of the line.
LINES = (
    ("stock DDP", "PyTorch DDP", "#444444", "", 2),
    ("DDP fp16 hook", "DDP with the fp16 hook", "#b8860b", "", 2),
    ("DDP PowerSGD hook", "DDP with the PowerSGD hook, rank 4", "#7b5ea7", "", 2),
    ("thinwire auto", "thinwire, compress=&quot;auto&quot;", "#00796b", "", 3.5),
    ("floor", "no communication", "#999999", "4 4", 1.5),
)
Series = Mapping[str, float]


def picture() -> str:
    """The SVG, the same text for the same figures."""
    series = {contestant: {rate: _seconds(contestant, rate) for rate in RATES} for contestant, *_ in LINES}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="15"'
        f' role="img" aria-label="{TITLE}, by link rate">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="26" font-size="18" fill="#222222">{TITLE}</text>',
        *_axes(),
    ]
    for number, (contestant, label, colour, dashes, width) in enumerate(LINES):
        parts += _line(series[contestant], colour, dashes, width)
        parts += _legend(number, label, colour, dashes, width)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _seconds(contestant: str, rate: str) -> float:
    (row,) = (
        row for row in contest_steps() if (row["model"], row["contestant"], row["rate"]) == (MODEL, contestant, rate)
    )
    return float(row["median_s"])


def _x(rate: str) -> float:
    first, last = (math.log(float(RATES[one])) for one in (next(iter(RATES)), list(RATES)[-1]))
    return LEFT + (RIGHT - LEFT) * (math.log(float(RATES[rate])) - first) / (last - first)


def _y(seconds: float) -> float:
    low, high = math.log(TICKS_S[0]), math.log(16)
    return BOTTOM - (BOTTOM - TOP) * (math.log(seconds) - low) / (high - low)


def _axes() -> Iterator[str]:
    for tick_s in TICKS_S:
        y = _y(tick_s)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}" stroke="#e4e4e4"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555555">{tick_s:g} s</text>'
    for rate, label in RATES.items():
        text = "1 Gbit/s" if rate == "1gbit" else label
        yield f'<text x="{_x(rate):.1f}" y="{BOTTOM + 20}" text-anchor="middle" fill="#555555">{text}</text>'
    middle = (LEFT + RIGHT) / 2
    yield f'<text x="{middle:.0f}" y="{BOTTOM + 42}" text-anchor="middle" fill="#555555">link rate, Mbit/s</text>'


def _line(series: Series, colour: str, dashes: str, width: float) -> Iterator[str]:
    points = [(_x(rate), _y(seconds)) for rate, seconds in series.items()]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{path}" fill="none" {_stroke(colour, dashes, width)}/>'
    if not dashes:
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{1.2 * width:.1f}" fill="{colour}"/>' for x, y in points)


def _legend(number: int, label: str, colour: str, dashes: str, width: float) -> Iterator[str]:
    y = LEGEND_Y + 23 * number
    stroke = _stroke(colour, dashes, width)
    yield f'<line x1="{LEGEND_X}" y1="{y - 4}" x2="{LEGEND_X + 24}" y2="{y - 4}" {stroke}/>'
    weight = ' font-weight="bold"' if width > 3 else ""
    yield f'<text x="{LEGEND_X + 32}" y="{y}" fill="{colour}"{weight}>{label}</text>'


def _stroke(colour: str, dashes: str, width: float) -> str:
    return f'stroke="{colour}" stroke-width="{width}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 where the file differs")
    if parser.parse_args().check:
        return int(not PATH.exists() or PATH.read_text(encoding="utf-8") != picture())
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(picture(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
