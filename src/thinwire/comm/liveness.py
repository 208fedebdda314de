"""Tells a slow rank from a dead one: every rank gives a sign of life through the store of torch.distributed.

gloo sees a killed rank at once, but a stopped one only at its time-out, and it does not say which. A short time-out ends jobs
in which a rank evaluates for a minute; a long one waits half an hour for a rank that will never come. So collectives have
DDP's own long time-out, and a thread that waits asks here, once a second, whether all ranks still give signs of life.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinwire.core import TransportError

log = logging.getLogger(__name__)
_BEAT_S = 1.0
_FEWEST_BEATS = 3  # before silence means anything
_ARRIVAL_POLL_S = 0.05
_FIRST_POLL_S = 0.001  # ranks mostly arrive together; each further look waits twice as long


class Liveness:
    """The signs of life of some ranks, as this rank sees them.

    Args:
        store: of the default process group; used through a connection of its own where it can be cloned.
        ranks: global ranks, in the order of the transport's.
        rank: this one, of the transport.
        silence_s: without a sign of life for so long a rank counts as missing.
    """

    def __init__(self, store: Any, ranks: Sequence[int], rank: int, silence_s: float) -> None:
        self._store = _own_connection(store)
        self._ranks, self._rank = list(ranks), rank
        self.silence_s = max(silence_s, _FEWEST_BEATS * _BEAT_S)
        self._seen: dict[int, tuple[bytes, float]] = {}  # by rank of the transport: its last sign, and since when
        self._lock = threading.Lock()  # several lanes may wait at the same time
        self._leaving = threading.Event()
        self._beats = 0
        self._beat()
        self._thread = threading.Thread(target=self._run, name="thinwire-liveness", daemon=True)
        self._thread.start()

    def missing(self) -> list[int]:
        """The ranks that have been silent for too long; also where the store itself is gone, which is rank 0's.

        Silence counts from the first call on: asked again and again while something is waited for.
        """
        now_s = time.monotonic()
        with self._lock:
            for rank, name in enumerate(self._ranks):
                sign = self._read(name)
                if rank not in self._seen or self._seen[rank][0] != sign:
                    self._seen[rank] = sign, now_s
            return [rank for rank, (_, since_s) in self._seen.items() if now_s - since_s >= self.silence_s]

    def forget(self) -> None:
        """What was waited for has come: silence counts from zero again."""
        with self._lock:
            self._seen.clear()

    def roll_call(self) -> str:
        """After a failure: who does not answer, in a sentence. Takes a few beats."""
        before = {rank: self._read(name) for rank, name in enumerate(self._ranks)}
        deadline_s = time.monotonic() + _FEWEST_BEATS * _BEAT_S
        silent = list(before)
        while silent and time.monotonic() < deadline_s:
            time.sleep(_ARRIVAL_POLL_S)
            silent = [rank for rank in silent if self._read(self._ranks[rank]) == before[rank]]
        if silent:
            names = ", ".join(map(str, silent))
            return f"Roll call: Ranks {names} failed to give a sign of life."
        return "Roll call: all ranks are alive, so the link was interrupted."

    def arrive(self, what: str) -> None:
        """Wait until all ranks are at the same point of set-up.

        Raises:
            TransportError: some rank does not come within ``silence_s``; it names them.
        """
        keys = {rank: f"thinwire/{what}/{name}" for rank, name in enumerate(self._ranks)}
        self._store.set(keys[self._rank], b"here")
        deadline_s = time.monotonic() + self.silence_s
        absent, poll_s = list(keys), _FIRST_POLL_S
        while absent := [rank for rank in absent if not self._store.check([keys[rank]])]:
            if time.monotonic() > deadline_s:
                names = ", ".join(map(str, absent))
                raise TransportError(
                    f"rank {names} did not call attach() within {self.silence_s:g} s. All ranks must call it at the same "
                    "point; look at the log of that rank, or raise timeout_s if it only takes longer to get there"
                )
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _ARRIVAL_POLL_S)

    def close(self) -> None:
        """End the signs of life: for the others this rank is gone."""
        self._leaving.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_BEAT_S)

    def _run(self) -> None:
        try:
            while not self._leaving.wait(_BEAT_S):
                self._beat()
        except Exception as error:  # the store is gone: the job is ending, or rank 0 is
            log.debug("no more signs of life: %s", error)

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"thinwire/alive/{self._ranks[self._rank]}", str(self._beats))

    def _read(self, name: int) -> bytes:
        """A rank's last sign; always the same where there is none, or no store to ask."""
        try:
            key = f"thinwire/alive/{name}"
            return bytes(self._store.get(key)) if self._store.check([key]) else b""
        except (RuntimeError, ValueError):  # DistError is a RuntimeError
            return b""


def default_timeout() -> timedelta:
    """How long the default process group waits: what DDP in this job would."""
    group = dist.group.WORLD
    assert group is not None
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout or timedelta(minutes=30)


def _own_connection(store: Any) -> Any:
    """A client of its own: on a shared one, a call that waits for another rank would hold up the signs of life."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store
