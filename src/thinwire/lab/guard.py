"""The owner's end of the reaper: what is alive, told through a pipe that the kernel closes when the owner dies."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, final

from thinwire.lab import reaper

# The command's own process reports itself to the reaper, through its standard input, before it becomes the command: an
# owner that is killed between starting a process and saying so would leave it to nobody. In a subshell, whose death by
# SIGPIPE (a reaper that someone killed) harms no one.
_REPORT_THEN_RUN = '(echo "start $$" >&0) 2>/dev/null; exec "$@" </dev/null'


@final
class Guard:
    """Start it before anything it should clean up, `close` it after the clean-up."""

    def __init__(self, lab: str) -> None:
        self._groups: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, lab],
            stdin=subprocess.PIPE,
            # A program that captures the owner's output reads to its end: the reaper must not hold it open.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath)},
            text=True,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C
        )

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> "subprocess.Popen[str]":
        """Start a command, its output in a pipe, in a process group of its own that ends when the owner dies."""
        process = subprocess.Popen(
            ["sh", "-c", _REPORT_THEN_RUN, "sh", *command],
            env=env,
            stdin=self._stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the lab alone, which then ends the hosts in order
        )
        self._groups.add(process.pid)
        return process

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
