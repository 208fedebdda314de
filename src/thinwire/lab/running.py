"""A command under way on all hosts of a lab, and what came of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from thinwire.lab.process import POLL_S, HostProcess, end_processes

TERMINATE_GRACE_S = 3.0


class Traffic(NamedTuple):
    """What went through one host's interface."""

    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, kw_only=True)
class LabResult:
    """What a command did on each host; sequences are indexed by host."""

    exit_codes: tuple[int, ...]  # negative: ended by that signal
    sent_bytes: tuple[int, ...] | None  # None where traffic cannot be counted (emulation)
    received_bytes: tuple[int, ...] | None
    duration_s: float
    first_failure: int | None  # the host that failed before any other did
    ended_by_lab: tuple[int, ...]  # hosts that were ended because another failed, or for taking too long
    timed_out: bool

    @property
    def ok(self) -> bool:
        """Whether the command succeeded on every host."""
        return not self.timed_out and not any(self.exit_codes)


@final
class Running:
    """Made by `Lab.start`. Unless somebody waits or polls, nobody notices that a host failed."""

    def __init__(
        self,
        processes: Sequence[HostProcess],
        counters: Callable[[], list[Traffic] | None],
        before: list[Traffic] | None,
        on_end: Callable[["Running"], None],
        failure_grace_s: float,
    ) -> None:
        self._processes = tuple(processes)
        self._counters = counters
        self._before = before
        self._on_end = on_end
        self._failure_grace_s = failure_grace_s
        self._started_s = time.monotonic()
        self._first_failure: int | None = None
        self._failed_s = 0.0
        self._ended_by_lab: tuple[int, ...] = ()
        self._timed_out = False
        self._result: LabResult | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each host's command (fault tests send it signals)."""
        return tuple(process.pid for process in self._processes)

    def poll(self) -> list[int | None]:
        """Return each host's exit code, None while its command runs."""
        codes = [process.poll() for process in self._processes]
        if self._first_failure is None and not self._ended_by_lab:
            self._first_failure = next((host for host, code in enumerate(codes) if code), None)
            self._failed_s = time.monotonic()
        return codes

    def wait(self, timeout_s: float | None = None) -> LabResult:
        """Wait until every host is done. After a failure, or after `timeout_s`, end those that are not."""
        deadline_s = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        while None in self.poll():
            self._timed_out = time.monotonic() > deadline_s
            if self._timed_out or self._line_error() or self._failure_is_old():
                self.terminate()
                break
            time.sleep(POLL_S)
        result = self._finish()
        if error := self._line_error():
            raise error
        return result

    def terminate(self, grace_s: float = TERMINATE_GRACE_S) -> None:
        """End the command on every host: SIGTERM, then SIGKILL after `grace_s`."""
        alive = [host for host, code in enumerate(self.poll()) if code is None]
        self._ended_by_lab += tuple(alive)
        end_processes([self._processes[host] for host in alive], grace_s)
        self._finish()

    def _failure_is_old(self) -> bool:
        return self._first_failure is not None and time.monotonic() - self._failed_s > self._failure_grace_s

    def _line_error(self) -> Exception | None:
        return next((process.line_error for process in self._processes if process.line_error), None)

    def _finish(self) -> LabResult:
        if self._result is None:
            duration_s = time.monotonic() - self._started_s
            traffic = self._traffic()
            self._on_end(self)
            for process in self._processes:
                process.drain()
            self._result = self._make_result(duration_s, traffic)
        return self._result

    def _traffic(self) -> list[Traffic] | None:
        now = self._counters()
        if now is None or self._before is None:
            return None
        return [
            Traffic(b.sent_bytes - a.sent_bytes, b.received_bytes - a.received_bytes)
            for a, b in zip(self._before, now, strict=True)
        ]

    def _make_result(self, duration_s: float, traffic: list[Traffic] | None) -> LabResult:
        codes = self.poll()
        return LabResult(
            exit_codes=tuple(code for code in codes if code is not None),
            sent_bytes=None if traffic is None else tuple(each.sent_bytes for each in traffic),
            received_bytes=None if traffic is None else tuple(each.received_bytes for each in traffic),
            duration_s=duration_s,
            first_failure=self._first_failure,
            ended_by_lab=self._ended_by_lab,
            timed_out=self._timed_out,
        )
