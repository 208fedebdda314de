"""The owner's end of the reaper: what is alive, told through a pipe that closes by itself when the owner dies."""

import contextlib
import os
import subprocess
import sys
from typing import IO, final

from thinwire.lab import reaper


@final
class Guard:
    """Start it before anything it should clean up, `close` it after the clean-up."""

    def __init__(self, lab: str) -> None:
        self._groups: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, lab],
            stdin=subprocess.PIPE,
            # Whoever captures the owner's output waits for its end: the reaper must not hold it open.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath)},
            text=True,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C
        )

    def started(self, group: int) -> None:
        """A process group to end if the owner dies."""
        self._groups.add(group)
        self._tell(f"start {group}")

    def ended(self, group: int) -> None:
        """A process group that is gone: its number may soon be someone else's."""
        self._groups.discard(group)
        self._tell(f"end {group}")

    def close(self) -> None:
        """Everything has been cleaned up: let the reaper go."""
        # A signal that arrives while a process is being started can lose it for everybody but this set.
        reaper.end_groups(self._groups)
        self._tell(reaper.DONE)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._process.wait()

    @property
    def _stdin(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _tell(self, message: str) -> None:
        # A reaper that someone killed is no reason to fail: it matters only if the owner is killed too.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._stdin.write(message + "\n")
            self._stdin.flush()
