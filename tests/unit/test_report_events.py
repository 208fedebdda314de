"""Events survive what happens to files: crashes, torn lines, other versions."""

import io
import json
import logging
from pathlib import Path

import pytest

from thinwire.observe.events import SCHEMA_VERSION, EventError, EventWriter, parse_event, read_events


def test_events_come_back_in_order(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "deep" / "a.jsonl") as events:
        events.write("run", label="x")
        events.write("step", step=0, loss=1.5)
    assert list(read_events(tmp_path / "deep" / "a.jsonl")) == [
        {"v": SCHEMA_VERSION, "kind": "run", "label": "x"},
        {"v": SCHEMA_VERSION, "kind": "step", "step": 0, "loss": 1.5},
    ]


def test_an_event_is_on_disk_before_the_file_is_closed(tmp_path: Path) -> None:
    events = EventWriter(tmp_path / "a.jsonl")
    events.write("step", step=7)
    assert [event["step"] for event in read_events(tmp_path / "a.jsonl")] == [7]
    events.close()


def test_a_torn_last_line_is_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"v": 1, "kind": "step", "step": 0}\n{"v": 1, "kind": "st')
    with caplog.at_level(logging.WARNING):
        assert [event["step"] for event in read_events(path)] == [0]
    assert f"{path}:2" in caplog.text


def test_appending_after_a_crash_keeps_the_new_event_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"v": 1, "kind": "step", "step": 0}\n{"v": 1, "kind": "st')
    with EventWriter(path) as events:
        events.write("step", step=1)
    assert [event["step"] for event in read_events(path)] == [0, 1]


def test_a_newer_version_is_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"v": SCHEMA_VERSION + 1, "kind": "run"}) + "\n")
    with pytest.raises(EventError, match="upgrade thinwire"):
        list(read_events(path))


def test_nan_losses_survive(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "a.jsonl") as events:
        events.write("step", loss=float("nan"))
    (event,) = read_events(tmp_path / "a.jsonl")
    assert event["loss"] != event["loss"]


@pytest.mark.parametrize("line", ["", "a log message", "[1, 2]", "3", '{"kind": "step"}', '{"v": 1}', '{"v": 1, "k'])
def test_what_is_no_event_is_told_apart(line: str) -> None:
    assert parse_event(line) is None


def test_the_echo_gets_the_same_lines(tmp_path: Path) -> None:
    echo = io.StringIO()
    with EventWriter(tmp_path / "a.jsonl", echo=echo) as events:
        events.write("eval", step=3, loss=2.0)
    assert echo.getvalue() == (tmp_path / "a.jsonl").read_text()
