"""The process that writes: takes jobs from a training process, answers when they are durable. No torch, so it starts fast.

It outlives a training process that is killed: what was handed over completely is still written, then it ends. Signals that
are meant for the training do not stop it half way; the end of its socket does.

Threads: the main thread reads messages, ``full`` writes checkpoints, ``log`` writes log records, so that a long checkpoint
does not hold up the log. Each job is handed to one of them through a queue; they share only the socket, which has a lock.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from thinwire.checkpoint import commit
from thinwire.checkpoint import manifest as names
from thinwire.checkpoint.files import Buffer, Files, LocalFiles, Output
from thinwire.checkpoint.manifest import Manifest
from thinwire.checkpoint.records import frame

MAX_MESSAGE_BYTES = 1 << 16
ORPHAN_WAIT_S = 5.0  # for the parts of other ranks, once the training process is gone


class Jobs:
    """What a writer does, over any file system.

    Args:
        give_up: whether waiting for other ranks is pointless.
    """

    def __init__(self, files: Files, give_up: Callable[[], bool] = lambda: False) -> None:
        self._files, self._give_up = files, give_up
        self._log: Output | None = None
        self._log_name = ""

    def full(self, job: dict[str, Any], spans: Sequence[Buffer]) -> None:
        """Write this rank's file; on the coordinator also commit, and retire what is older. Raises OSError."""
        step, run, rank, world_size = (job[key] for key in ("step", "run", "rank", "world_size"))
        temporary = names.temporary_name(step, run)
        self._files.make_directory(temporary)
        shard = commit.write_shard(self._files, temporary, rank, spans[0], job["flush_bytes"])
        if rank != 0:
            commit.write_part(self._files, temporary, rank, shard)
            return
        parts = commit.gather_parts(self._files, temporary, world_size, self._give_up, job["timeout_s"])
        shards = {names.shard_name(0): shard, **parts}
        manifest = Manifest(step, job["chain"], run, world_size, job["fingerprint"], shards, job["info"])
        commit.commit(self._files, temporary, manifest)
        with suppress(OSError):  # the new one is durable; what is left over goes next time
            commit.retire(self._files, job["keep"], step)

    def abandon(self, job: dict[str, Any]) -> None:
        """Remove what a failed checkpoint has left. Others may still be writing their part of it: only the coordinator."""
        if job["rank"] == 0:
            self._files.remove(names.temporary_name(job["step"], job["run"]))

    def log(self, job: dict[str, Any], spans: Sequence[Buffer]) -> None:
        """Append a record; with ``sync`` it and those before it are durable. Raises OSError."""
        crc32 = 0
        for span in spans:
            crc32 = zlib.crc32(span, crc32)
        header = frame(job["step"], job["before"], job["after"], sum(map(len, spans)), crc32)
        if job["file"] != self._log_name:
            self.end_log()
            self._log, self._log_name = self._files.create(job["file"]), job["file"]
            # Its name must last before its first record is acknowledged.
            self._files.sync_directory()
        if self._log is None:
            raise OSError("the log ended with an earlier error")
        try:
            for piece in (header, *spans):
                self._log.write(piece)
            if job["sync"]:
                self._log.sync()
        except OSError:
            # A record may be half there: nothing may follow it in this file.
            self.end_log()
            raise

    def end_log(self) -> None:
        """Close the log file."""
        log, self._log = self._log, None
        if log is not None:
            with suppress(OSError):
                log.sync()
            log.close()


class Writer:
    """The process: messages in, jobs done, answers out."""

    def __init__(self, channel: socket.socket, directory: str) -> None:
        self._channel, self._sending = channel, threading.Lock()
        self._orphaned_s: float | None = None
        self._jobs = Jobs(LocalFiles(directory), self._is_orphaned)
        self._arenas: dict[str, mmap.mmap] = {}
        self._queues: dict[str, queue.SimpleQueue[dict[str, Any] | None]] = {}

    def run(self) -> None:
        """Until the training process says ``quit`` or is gone."""
        threads = []
        for kind in ("full", "log"):
            self._queues[kind] = queue.SimpleQueue()
            threads.append(threading.Thread(target=self._work, args=(kind,), name=kind))
            threads[-1].start()
        try:
            self._serve()
        finally:  # threads that wait for jobs would keep the process for ever
            for kind, thread in zip(("full", "log"), threads, strict=True):
                self._queues[kind].put(None)
                thread.join()
            self._jobs.end_log()

    def _serve(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._channel, MAX_MESSAGE_BYTES, 1)
            except ConnectionResetError:
                continue  # the trainer has ended with answers unread; what it sent before is still to come
            message: dict[str, Any] = json.loads(data) if data else {"op": "quit"}
            if message["op"] == "quit":
                self._orphaned_s = None if data else time.monotonic()
                return
            if message["op"] == "arena":
                # The trainer replaces an arena only when nothing of the old one is with us any more.
                self._arenas[message["which"]] = mmap.mmap(fds[0], message["size"])
                os.close(fds[0])
            else:
                self._queues[message["op"]].put(message)

    def _work(self, kind: str) -> None:
        while (job := self._queues[kind].get()) is not None:
            started_s = time.monotonic()
            spans = [memoryview(self._arenas[kind])[at : at + size] for at, size in job["spans"]]
            answer = {"kind": kind, "step": job["step"], "bytes": sum(map(len, spans))}
            try:
                getattr(self._jobs, kind)(job, spans)
            except Exception as error:  # whatever it is: training goes on, and is told
                answer["error"] = f"{type(error).__name__}: {error}"
                if kind == "full":
                    with suppress(OSError):
                        self._jobs.abandon(job)
            for span in spans:
                span.release()
            self._answer({**answer, "seconds": time.monotonic() - started_s})

    def _answer(self, answer: dict[str, Any]) -> None:
        with suppress(OSError), self._sending:  # nobody listens once the training process is gone
            self._channel.send(json.dumps(answer).encode())

    def _is_orphaned(self) -> bool:
        return self._orphaned_s is not None and time.monotonic() > self._orphaned_s + ORPHAN_WAIT_S


def main(arguments: list[str]) -> None:
    """``FD DIRECTORY``: serve the training process at the other end of the socket. It has also passed on a lock."""
    fd, directory = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(5)  # training goes first
    channel = socket.socket(fileno=int(fd))
    Writer(channel, directory).run()


if __name__ == "__main__":
    main(sys.argv[1:])
