"""A simulated step as text, on steps worked by hand."""

from __future__ import annotations

import io

from rich.console import Console

from sim.fusion_models import case
from thinwire.comm.trace import Span
from thinwire.fusion import Curve, unfused_groups
from thinwire.plan import Cluster, draw, simulate_groups

# Ready at 1, 2, 3 s; encoding 1 s per 100 elements; messages 1 s + 1 s per 400 bytes.
CASE = case([100] * 3, [1.0, 2.0, 3.0], Curve(((0.0, 0.0), (100.0, 1.0))), Curve(((0.0, 1.0), (400.0, 2.0))))


def _spans(activity: str, *, fused: bool) -> list[tuple[int, float, float]]:
    specs = CASE.profile.specs
    step = CASE.simulated([specs] if fused else unfused_groups(specs))
    return [(span.group, span.start_s, span.end_s) for span in step.spans if span.activity == activity]


def test_a_step_without_fusion() -> None:
    assert _spans("encode", fused=False) == [(0, 1.0, 2.0), (1, 2.0, 3.0), (2, 3.0, 4.0)]
    assert _spans("wire", fused=False) == [(0, 2.0, 4.0), (1, 4.0, 6.0), (2, 6.0, 8.0)]
    assert _spans("wait", fused=False) == [(-1, 3.0, 8.0)]


def test_a_step_with_one_group() -> None:
    assert _spans("encode", fused=True) == [(0, 3.0, 6.0)]
    assert _spans("wire", fused=True) == [(0, 6.0, 10.0)]


def test_a_model_without_gradients() -> None:
    empty = simulate_groups([], 0.0, Cluster(world_size=2))
    assert (empty.finish_s, empty.wait_s) == (0.0, 0.0)
    assert draw(empty.spans) == "nothing to send"


def test_the_drawing_shows_three_lanes_and_the_wait() -> None:
    lines = draw(CASE.simulated(unfused_groups(CASE.profile.specs)).spans, width=16).splitlines()
    assert [line.rstrip() for line in lines] == [
        "backward ======··········",
        "encode   ··001122········",
        "wire     ····000011112222",
        "         0      8000.0 ms",
        "         3 message(s), backward 3000.0 ms, waiting 5000.0 ms",
    ]


def test_the_shortest_message_still_gets_a_cell() -> None:
    spans = [
        Span("backward", 0.0, 9.0),
        *(Span("encode", at_s, at_s + 0.001, group) for group, at_s in enumerate((1.0, 9.0))),
        Span("wire", 1.001, 1.002, 0),
        Span("wire", 9.001, 10.0, 1),
        Span("decode", 9.999, 10.0, 1),
    ]
    assert draw(spans, width=10).splitlines()[:4] == [
        "backward =========·",
        "encode   ·0·······1",
        "wire     ·0·······1",
        "decode   ·········1",
    ]


def test_the_drawing_has_nothing_that_rich_takes_for_markup() -> None:
    spans = [Span("backward", 0.0, 80.0), *(Span("wire", i + 1.5, i + 2.0, i) for i in range(80))]
    text = draw(spans)
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(text)
    assert isinstance(console.file, io.StringIO)
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == [x.rstrip() for x in text.splitlines()]
