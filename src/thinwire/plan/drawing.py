"""A simulated step as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thinwire.comm.trace import Activity, Span

# One per group, in turn. No brackets: rich would read them as markup.
_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyz"
_IDLE, _BACKWARD = "·", "="
_LANES: tuple[Activity, ...] = ("backward", "encode", "wire", "decode")


def draw(spans: Sequence[Span], width: int = 100) -> str:
    """Lanes over one time axis, ``width`` cells wide; fusion group ``i`` has the same symbol in all of them.

    Whatever is right of the end of backward is time in which training waits.

    Args:
        spans: of one step, as ``Simulated.spans``.
    """
    messages, finish_s = [span for span in spans if span.activity == "wire"], max((s.end_s for s in spans), default=0.0)
    if not messages or finish_s <= 0:
        return "nothing to send"
    lanes = {name: [span for span in spans if span.activity == name and span.seconds > 0] for name in _LANES}
    lines = [f"{name:9}{_paint(shown, finish_s, width)}" for name, shown in lanes.items() if shown]
    end = _milliseconds(finish_s)
    lines.append(f"{'':9}{'0':{width - len(end)}}{end}")
    backward_s = sum(span.seconds for span in lanes["backward"])
    lines.append(
        f"{'':9}{len(messages)} message(s), backward {_milliseconds(backward_s)}, "
        f"waiting {_milliseconds(finish_s - backward_s)}"
    )
    return "\n".join(lines)


def _paint(spans: Iterable[Span], finish_s: float, width: int) -> str:
    cells = [_IDLE] * width
    for span in spans:
        first = min(int(width * span.start_s / finish_s), width - 1)
        last = max(first + 1, min(round(width * span.end_s / finish_s), width))
        symbol = _SYMBOLS[span.group % len(_SYMBOLS)] if span.group >= 0 else _BACKWARD
        cells[first:last] = symbol * (last - first)
    return "".join(cells)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
