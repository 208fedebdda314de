"""Case: one rank is stopped (SIGSTOP) and never goes on. Three ranks."""

from __future__ import annotations

import os
import signal
import time

import thinwire
from gloo.support import Case, Net, Rank, loss_of, seeded, wrap

VICTIM = 1
TIMEOUT_S = 4.0


def survivors_give_up(rank: Rank) -> dict[str, object]:
    """Nothing tells a stalled rank from a slow one but the time-out."""
    model = wrap("ddp", seeded(Net))
    with thinwire.attach(model, compress="int4", timeout_s=TIMEOUT_S):
        for step in range(2):  # DDP's own collectives, which have DDP's time-out, are over after the second forward
            loss_of(model, rank.index, step).backward()
        if rank.index == VICTIM:
            os.kill(os.getpid(), signal.SIGSTOP)
        started_s = time.monotonic()
        try:
            loss_of(model, rank.index, 2).backward()
        except thinwire.TransportError as error:
            return {"message": str(error), "seconds": time.monotonic() - started_s}
    raise AssertionError("the stalled rank 1 was not noticed")


CASES: dict[str, Case] = {"survivors_give_up": survivors_give_up}
