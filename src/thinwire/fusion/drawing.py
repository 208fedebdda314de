"""A simulated step as text."""

from __future__ import annotations

from collections.abc import Iterable

from thinwire.fusion.timeline import Timeline

# One per message, in turn. No brackets: rich would read them as markup.
_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyz"
_IDLE = "·"

Span = tuple[float, float]


def draw(timeline: Timeline, width: int = 100) -> str:
    """Three lanes over one time axis, ``width`` cells wide; message ``i`` has the same symbol in all of them.

    Backward shows which message's gradients are being computed, encode and wire what the communication thread and the
    network do. Whatever is right of the end of backward is time in which training waits.
    """
    if not timeline.messages or timeline.finish_s <= 0:
        return "nothing to send"
    lanes: dict[str, Iterable[Span]] = {
        "backward": _backward_spans(timeline),
        "encode": [(sent.encode_start_s, sent.encode_end_s) for sent in timeline.messages],
        "wire": [(sent.message_start_s, sent.message_end_s) for sent in timeline.messages],
    }
    lines = [f"{name:9}{_paint(spans, timeline.finish_s, width)}" for name, spans in lanes.items()]
    end = _milliseconds(timeline.finish_s)
    lines.append(f"{'':9}{'0':{width - len(end)}}{end}")
    lines.append(
        f"{'':9}{len(timeline.messages)} message(s), backward {_milliseconds(timeline.backward_s)}, "
        f"waiting {_milliseconds(timeline.exposed_s)}"
    )
    return "\n".join(lines)


def _backward_spans(timeline: Timeline) -> list[Span]:
    spans: list[Span] = []
    begin_s = 0.0
    for sent in timeline.messages:
        spans.append((begin_s, sent.ready_s))
        begin_s = max(begin_s, sent.ready_s)
    return spans


def _paint(spans: Iterable[Span], finish_s: float, width: int) -> str:
    cells = [_IDLE] * width
    for index, (start_s, end_s) in enumerate(spans):
        if end_s <= start_s:
            continue
        first = min(int(width * start_s / finish_s), width - 1)
        last = max(first + 1, min(round(width * end_s / finish_s), width))
        cells[first:last] = _SYMBOLS[index % len(_SYMBOLS)] * (last - first)
    return "".join(cells)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
