"""Case: one rank is killed in the middle of a step. Three ranks."""

from __future__ import annotations

import os
import signal
import time

import thinwire
from gloo.support import Case, Net, Rank, loss_of, seeded

VICTIM = 2


def survivors_end(rank: Rank) -> dict[str, object]:
    """Rank 2 dies; the others say so within tens of seconds and can go on with something else."""
    model = seeded(Net)
    with thinwire.attach(model, compress="topk(density=0.1)") as wire:
        loss_of(model, rank.index, 0).backward()
        if rank.index == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        before = {name: dict(state) for name, state in wire.state_dict()["tensors"].items()}
        started_s = time.monotonic()
        try:
            loss_of(model, rank.index, 1).backward()
        except thinwire.TransportError as error:
            after = wire.state_dict()["tensors"]
            same = all(bool((after[n][k] == value).all()) for n, s in before.items() for k, value in s.items())
            return {"message": str(error), "seconds": time.monotonic() - started_s, "state_kept": same}
    raise AssertionError("the death of rank 2 was not noticed")


CASES: dict[str, Case] = {"survivors_end": survivors_end}
