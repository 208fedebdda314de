"""The training process's end of a writer process: hand over, ask what has become of it, start another one when it dies.

Belongs to the training thread, except ``send_full``, which the copy thread calls: the socket sends whole messages at once,
and which arena is in use changes only while no copy is running.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.checkpoint.arena import Arena, Ring
from thinwire.checkpoint.writer import MAX_MESSAGE_BYTES

_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from thinwire.checkpoint.writer import main; main(sys.argv[1:])"
)
_MAX_STARTS = 5
_END_S = 600.0


class Client:
    """A writer process, and the memory shared with it.

    Args:
        log_bytes: the most that log records on their way may take; 0: there is no log.

    Attributes:
        busy: the step of a checkpoint that is on its way; its memory must not be touched.
        dead: writers die as soon as they are started; nothing is written any more.
        pid: of the writer process.
    """

    def __init__(self, directory: Path, rank: int, log_bytes: int = 0) -> None:
        self._directory, self._rank = directory, rank
        self._arenas: dict[str, Arena] = {}
        self._ring = Ring(log_bytes)
        self._spans: list[tuple[int, int]] = []  # of the record that is being made
        self._pending: list[tuple[int, int]] = []  # step and number of spans of the records on their way
        self._starts = 0
        self.busy: int | None = None
        self.dead = False
        self._start()
        if log_bytes:
            self._make_arena("log", log_bytes)

    def full_arena(self, size: int) -> Arena:
        """Memory for a checkpoint of this size; the same one every time unless it is too small."""
        assert self.busy is None, "its memory is being written from"
        if "full" not in self._arenas or self._arenas["full"].size < size:
            self._make_arena("full", size)
        return self._arenas["full"]

    def send_full(self, job: dict[str, Any], size: int) -> None:
        """Hand the first ``size`` bytes of the arena over."""
        self._send({"op": "full", "spans": [[0, size]], **job})

    def log_span(self, size: int) -> memoryview | None:
        """Memory for a part of the next log record; None where the writer is too far behind."""
        at = self._ring.take(-(-size // 64) * 64)  # the next one begins at an aligned address
        if at is None:
            return None
        self._spans.append((at, size))
        return memoryview(self._arenas["log"].map)[at : at + size]

    def send_log(self, job: dict[str, Any]) -> None:
        """Hand the spans taken since the last call over, as one record."""
        spans, self._spans = self._spans, []
        self._pending.append((job["step"], len(spans)))
        self._send({"op": "log", "spans": spans, **job})

    def drop_spans(self) -> None:
        """Give back the spans of a record that will not be made."""
        for _ in self._spans:
            self._ring.take_back()
        self._spans = []

    def answers(self, timeout_s: float = 0.0) -> list[dict[str, Any]]:
        """What the writer has said since the last call; with a time-out waits for the first. Its death is an answer too."""
        found = list[dict[str, Any]]()
        if self.dead:
            return found
        self._channel.settimeout(timeout_s)  # 0 does not wait
        while True:
            try:
                data = self._channel.recv(MAX_MESSAGE_BYTES)
            except (BlockingIOError, TimeoutError):
                return found
            except OSError:
                data = b""
            if not data:
                return found + self._died()
            self._channel.setblocking(False)
            found.append(self._take(json.loads(data)))

    def close(self) -> None:
        """Wait for all that was handed over, then end the process."""
        self._send({"op": "quit"})
        self._channel.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for arena in self._arenas.values():
            arena.close()
        self._arenas = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pending(self) -> bool:
        """Whether something is on its way."""
        return self.busy is not None or bool(self._pending)

    def _take(self, answer: dict[str, Any]) -> dict[str, Any]:
        self._starts = 1 if "error" not in answer else self._starts
        if answer["kind"] == "full":
            self.busy = None
        else:
            for _ in range(self._pending.pop(0)[1]):
                self._ring.give_back()
        return answer

    def _died(self) -> list[dict[str, Any]]:
        """Everything on its way is lost; a new writer serves what comes."""
        code = self._process.wait()
        error = f"the writer process ended with status {code} (negative: killed by that signal)"
        lost = [{"kind": "log", "step": step, "error": error} for step, _ in self._pending]
        if self.busy is not None:
            lost.append({"kind": "full", "step": self.busy, "error": error})
        self.busy, self._pending, self._spans = None, [], []
        self._ring.clear()
        self._channel.close()
        if self._starts < _MAX_STARTS:
            self._start()
            for which, arena in self._arenas.items():
                self._announce(which, arena)
        else:
            self.dead = True
            error += f"; it was started {_MAX_STARTS} times without finishing anything, and stays away"
        return lost or [{"kind": "writer", "step": -1, "error": error}]

    def _start(self) -> None:
        self._starts += 1
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).parents[2])
        # Taken here and passed on, so that there is no moment in which a writer exists without it. The process that trains
        # closes its end: the lock lasts exactly as long as the writer, whatever ends either of them.
        lock = _lock(self._directory / f"lock-rank-{self._rank:05d}")
        passed = [fd for fd in (theirs.fileno(), lock) if fd is not None]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, root, str(theirs.fileno()), str(self._directory)],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C and a launcher's signals are for the training
        )
        if lock is not None:
            with suppress(OSError):
                os.pwrite(lock, f"{self._process.pid:<20}\n".encode(), 0)
            os.close(lock)
        theirs.close()

    def _make_arena(self, which: str, size: int) -> None:
        old = self._arenas.pop(which, None)
        if old is not None:
            old.close()
        self._arenas[which] = Arena(size)
        self._announce(which, self._arenas[which])

    def _announce(self, which: str, arena: Arena) -> None:
        with suppress(OSError):  # a writer that is gone is noticed when answers are asked for
            message = json.dumps({"op": "arena", "which": which, "size": arena.size}).encode()
            socket.send_fds(self._channel, [message], [arena.fd])

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):
            self._channel.send(json.dumps(message).encode())


def _lock(path: Path) -> int | None:
    """An open file that is locked; None where that is not possible (a directory that cannot be written to any more)."""
    try:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError:
        return None
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def wait_for_writers(directory: Path, timeout_s: float) -> None:
    """Until the writers of an earlier run are gone: what they still commit must be seen, not overtaken.

    Raises:
        TimeoutError: one is still there; the message names its process.
    """
    until_s = time.monotonic() + timeout_s
    for path in sorted(directory.glob("lock-rank-*")):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            while not _try_lock(fd):
                if time.monotonic() > until_s:
                    owner = path.read_text().strip() or "unknown"
                    raise TimeoutError(f"process {owner} still writes to it; end that run first")
                time.sleep(0.02)
        finally:
            os.close(fd)


def _try_lock(fd: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
