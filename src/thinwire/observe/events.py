"""Events of a run: one JSON object per line, versioned, readable after a crash.

Every line has ``v`` (the schema version) and ``kind``; ``thinwire.observe.kinds`` lists the fields of each kind. A file of a
rank starts with one ``run`` event that describes the run.

``elapsed_s`` counts training only: evaluation and start-up are left out, for every contestant alike.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from thinwire.core.schema import from_json
from thinwire.observe.kinds import Head

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
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "v" in event and "kind" in event else None


def read_events(path: Path, kinds: Mapping[str, type[Head]] = {}) -> Iterator[Event]:
    """Yield the events of a file in order; torn lines are skipped, with one warning.

    Args:
        kinds: what is checked: those who read the fields of an event give ``KINDS``.

    Raises:
        EventError: the file was written by a newer thinwire, or a field is missing or of another type.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    torn, found = [], False
    for number, line in enumerate(lines, start=1):
        event = parse_event(line)
        if event is None:
            torn.append(number)
            continue
        where = {"what": f"event in {path}:{number}", "remedy": "remove the line, or record the run again"}
        head = from_json(Head, event, **where, error=EventError)
        if head.v > SCHEMA_VERSION:
            raise EventError(
                f"{path}:{number} has events of version {head.v}, this thinwire reads up to {SCHEMA_VERSION}: "
                "upgrade thinwire to read this run"
            )
        from_json(kinds.get(head.kind, Head), event, **where, error=EventError)
        found = True
        yield event
    if torn and found:  # without any event the reader says so itself
        logger.warning("%s:%d is torn or no event; skipped, as %d such lines", path, torn[0], len(torn))
