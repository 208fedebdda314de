"""One host's command: its process group, its output line by line, and its end."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import final

from thinwire.lab.guard import Guard

OnLine = Callable[[int, str], None]
POLL_S = 0.02
_DRAIN_S = 2.0


@final
class HostProcess:
    """A command that runs in a process group of its own; `on_line(host, line)` gets what it writes."""

    def __init__(
        self, host: int, command: Sequence[str], env: Mapping[str, str], on_line: OnLine, guard: Guard
    ) -> None:
        self.host = host
        self.line_error: Exception | None = None  # what `on_line` raised first
        self._on_line = on_line
        self._guard = guard
        self._process = guard.start(command, env)
        self._reader = threading.Thread(target=self._read_lines, name=f"lab-host{host}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The command's process, which leads the group of the same number."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal that ended it), or None while it runs."""
        if self._process.returncode is None and self._has_exited():
            # A host whose command has ended is off. Signal before reaping: after it, the number may be someone else's.
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._guard.ended(self.pid)
        return self._process.returncode

    def signal(self, number: int) -> None:
        """Send a signal to the whole group, unless it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def drain(self) -> None:
        """Wait until the last line was delivered (not forever: a process that left the group may hold the pipe)."""
        self._reader.join(timeout=_DRAIN_S)

    def _has_exited(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._deliver(line.rstrip("\n"))

    def _deliver(self, line: str) -> None:
        if self.line_error is None:
            try:
                self._on_line(self.host, line)
            except Exception as error:  # the owner's thread raises it; this one goes on, or the host would block
                self.line_error = error


def end_processes(processes: Sequence[HostProcess], grace_s: float) -> None:
    """Ask the processes to end (SIGTERM), kill those still there after `grace_s`, and return when all have ended."""
    for process in processes:
        process.signal(signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline_s:
            for process in processes:
                process.signal(signal.SIGKILL)
        time.sleep(POLL_S)
