"""Cases: ranks that are slow, leave, never come, or stop while the others attach. Three ranks, one launch for each case."""

from __future__ import annotations

import os
import signal
import time
from unittest.mock import patch

import torch.distributed as dist

import thinwire
from gloo.support import Case, Net, Rank, loss_of, seeded

VICTIM = 1
TIMEOUT_S = 3.0


def _error_of_backward(net: Net, rank: Rank, step: int) -> dict[str, object]:
    started_s = time.monotonic()
    try:
        loss_of(net, rank.index, step).backward()
    except thinwire.TransportError as error:
        return {"message": str(error), "seconds": time.monotonic() - started_s}
    raise AssertionError("the missing rank was not noticed")


def _error_of_attach(rank: Rank) -> dict[str, object]:
    started_s = time.monotonic()
    try:
        thinwire.attach(seeded(Net), compress="topk(density=0.1)", timeout_s=TIMEOUT_S)
    except thinwire.TransportError as error:
        return {"message": str(error), "seconds": time.monotonic() - started_s}
    raise AssertionError("the missing rank was not noticed")


def slow(rank: Rank) -> float:
    """Rank 1 evaluates for longer than the time-out. It gives signs of life, so the others wait."""
    net = seeded(Net)
    with thinwire.attach(net, compress="int4", timeout_s=TIMEOUT_S):
        for step in range(2):
            if (rank.index, step) == (VICTIM, 1):
                time.sleep(2.5 * TIMEOUT_S)
            loss_of(net, rank.index, step).backward()
    return float(sum(p.grad.sum() for p in net.parameters() if p.grad is not None))


def leaves(rank: Rank) -> dict[str, object]:
    """Rank 1 has left the loop; the process goes on with something else."""
    net = seeded(Net)
    assert isinstance(net, Net)
    with thinwire.attach(net, compress="int4", timeout_s=TIMEOUT_S):
        loss_of(net, rank.index, 0).backward()
        if rank.index != VICTIM:
            return _error_of_backward(net, rank, 1)
    time.sleep(6 * TIMEOUT_S)
    return {}


def never_comes(rank: Rank) -> dict[str, object]:
    if rank.index == VICTIM:
        time.sleep(5 * TIMEOUT_S)
        return {}
    return _error_of_attach(rank)


def stops_while_attaching(rank: Rank) -> dict[str, object]:
    def stop(*arguments: object, **settings: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    if rank.index == VICTIM:
        with patch.object(dist, "new_group", stop):
            thinwire.attach(seeded(Net), timeout_s=TIMEOUT_S)
    return _error_of_attach(rank)


def dies_while_attaching(rank: Rank) -> dict[str, object]:
    def die(*arguments: object, **settings: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank.index == VICTIM:
        with patch.object(dist, "new_group", die):
            thinwire.attach(seeded(Net), timeout_s=TIMEOUT_S)
    return _error_of_attach(rank)


ALL: dict[str, Case] = {
    case.__name__: case for case in (slow, leaves, never_comes, stops_while_attaching, dies_while_attaching)
}
CASES: dict[str, Case] = {name: case for name, case in ALL.items() if name == os.environ.get("ABSENT_CASE", name)}
