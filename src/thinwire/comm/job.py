"""What a scheduler works off: groups on their way through the rounds, and the ends of steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from thinwire.comm.transport import Pending, Tag
from thinwire.core import Request, TransportError

# Group numbers from here on belong to no fusion group: agreements, set-up.
FIRST_RESERVED_GROUP = 0xFFFF_0000
Rounds = Generator[tuple[Request, ...], Any, Any]


class Ticket:
    """A submitted group."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._callback: Callable[[BaseException | None], None] | None = None
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether the group has ended, well or not."""
        return self._done.is_set()

    def finish(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._error = error
            self._done.set()
            callback = self._callback
        if callback is not None:
            callback(error)

    def then(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call ``callback`` with the error, or None, once the group is done; at once if it already is."""
        with self._lock:
            self._callback = callback
            late = self._done.is_set()
        if late:
            callback(self._error)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the group is done; raises what went wrong with it."""
        if not self._done.wait(timeout_s):
            raise TransportError(f"no answer from the communication thread within {timeout_s} s; is a rank missing?")
        if self._error is not None:
            raise self._error


@dataclass(eq=False)
class Job:
    """One group on its way through the rounds.

    Args:
        in_lanes: its rounds travel in lanes of their own.
    """

    prepare: Callable[[], Rounds]
    done: Callable[[Any], None]
    tag: Tag
    in_lanes: bool
    ticket: Ticket
    context: AbstractContextManager[Any]
    exchange: Rounds | None = None
    pending: list[Pending] = field(default_factory=list)
    rounds: int = 0
    sent_s: float = 0.0
    sent_bytes: int = 0

    @property
    def traced_group(self) -> int:
        return self.tag.group if self.tag.group < FIRST_RESERVED_GROUP else -1


@dataclass(eq=False)
class Flush:
    """The end of a step."""

    done: Callable[[], None]
    in_lanes: bool
    ticket: Ticket
