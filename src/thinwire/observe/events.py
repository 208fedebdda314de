"""Events of a run: one JSON object per line, versioned, readable after a crash.

Every line has ``v`` (the schema version) and ``kind``. A file of a rank starts with one ``run`` event that describes
the run; the fields depend on the kind:

====== =====================================================================================================
kind   fields
====== =====================================================================================================
run    ``label``, ``mode``, ``rank``, ``world_size``, ``settings`` (object), ``versions`` (object), ``started_at``
step   ``step``, ``loss``, ``step_s``, ``elapsed_s``, ``sent_bytes``; with thinwire also ``wait_s``, ``encode_s``,
       ``wire_s``, ``decode_s``, ``wire_bytes`` (all of this step alone)
eval   ``step``, ``loss``, ``elapsed_s``
trace  ``step``, ``rank``, ``spans``: a list of ``activity`` (backward, encode, wire, decode, wait), ``start_s``, ``end_s``,
       ``group``, ``sent_bytes``; times count from the first span
plan   ``step`` (the first under the plan), ``compress``, ``fuse``, ``step_s``, ``dense_s``, ``floor_s`` (all predicted),
       ``explanation``; with ``compress="auto"``
ledger ``step``, ``noise`` and ``compression`` of the mean gradient, relative to its square; ``worst_unit`` and
       ``worst_share`` (compression over noise); once enough was booked ``error`` and ``noise_share`` of one rank's gradient;
       every 50 steps with ``compress="auto"``
sync   ``step``, ``fragment``, ``committed``, ``wire_bytes``, ``wait_s`` of an average of deltas; ``mean_square`` of the mean
       delta and ``drift_square`` of the ranks' around it; ``numbers`` that an adaptive policy goes by
lab    ``sent_bytes`` (per host over the whole run, from the interface counters)
end    ``steps``, ``elapsed_s``
====== =====================================================================================================

``elapsed_s`` counts training only: evaluation and start-up are left out, for every contestant alike.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

SCHEMA_VERSION = 1

Event = dict[str, Any]

logger = logging.getLogger(__name__)


class EventError(ValueError):
    """A file of events that cannot be understood."""


class EventWriter:
    """Append events to a file; each is flushed as one whole line, so that a crash tears at most the last."""

    def __init__(self, path: Path, echo: TextIO | None = None) -> None:
        """Open ``path`` (its directory is made); ``echo`` gets a copy of every line, for a program that watches the run."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_torn_line(path)
        self._file = path.open("a", encoding="utf-8")
        self._echo = echo

    def write(self, kind: str, **fields: Any) -> None:
        """Write one event now."""
        line = json.dumps({"v": SCHEMA_VERSION, "kind": kind, **fields}, allow_nan=True) + "\n"
        for stream in (self._file, self._echo):
            if stream is not None:
                stream.write(line)
                stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _end_torn_line(path: Path) -> None:
    """End a line that a crash cut short, so that the next event does not become part of it."""
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def parse_event(line: str) -> Event | None:
    """Return the event in ``line``, or None if the line is no event (a log message, or torn)."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or "v" not in event or "kind" not in event:
        return None
    return event


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a file in order; torn lines are skipped with a warning.

    Raises:
        EventError: the file was written by a newer thinwire.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        event = parse_event(line)
        if event is None:
            logger.warning("%s:%d is torn or no event; skipped", path, number)
        elif event["v"] > SCHEMA_VERSION:
            raise EventError(
                f"{path}:{number} has events of version {event['v']}, this thinwire reads up to {SCHEMA_VERSION}: "
                "upgrade thinwire to read this run"
            )
        else:
            yield event
