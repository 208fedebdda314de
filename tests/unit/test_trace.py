"""Traces: overlapping spans count once, events start at zero, Perfetto's file has one process per rank."""

import json
from pathlib import Path

from thinwire.comm.trace import Span, Trace, write_chrome_trace
from thinwire.observe.html.figures import timeline

TRACE = Trace(
    step=7,
    rank=1,
    spans=(
        Span("backward", 10.0, 11.0),
        Span("wire", 10.2, 10.6, group=0, sent_bytes=1000),
        Span("wire", 10.4, 10.9, group=1, sent_bytes=500),
        Span("wait", 11.0, 11.25),
    ),
)


def test_overlapping_messages_count_once() -> None:
    assert abs(TRACE.seconds("wire") - 0.7) < 1e-9
    assert TRACE.seconds("encode") == 0.0


def test_events_count_from_the_first_span() -> None:
    event = TRACE.to_event()
    assert (event["step"], event["rank"]) == (7, 1)
    assert [round(span["start_s"], 3) for span in event["spans"]] == [0.0, 0.2, 0.4, 1.0]


def test_the_report_draws_every_span() -> None:
    bars = timeline([TRACE.to_event()]).data
    assert sum(len(bar.x) for bar in bars) == len(TRACE.spans)


def test_chrome_trace(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    write_chrome_trace([TRACE], path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1}
    assert [(e["name"], round(e["ts"]), round(e["dur"])) for e in events][1] == ("wire 0", 200_000, 400_000)
