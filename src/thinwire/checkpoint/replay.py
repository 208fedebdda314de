"""Does logged steps again: sequentially over steps, for with momentum and Adam a sum of gradients leads elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from thinwire.checkpoint.blobs import read_blob, split
from thinwire.checkpoint.files import Files
from thinwire.checkpoint.gradients import decode
from thinwire.checkpoint.optim_state import set_groups
from thinwire.checkpoint.records import Record
from thinwire.checkpoint.sealed import Damaged
from thinwire.checkpoint.state import TrainingState


def replay(
    files: Files, records: Sequence[Record], tails: Sequence[Record], state: TrainingState
) -> dict[str, Any] | None:
    """From the point that ``state`` is at to the last record; that record's local state, applied.

    Args:
        records: with gradients.
        tails: of this rank, for the same steps.
    """
    tail: dict[str, Any] | None = None
    with ThreadPoolExecutor(1, "thinwire-replay") as pool, _without_hooks(state.optimizers):
        # The next record is read and decoded while the optimizer steps.
        coming = pool.submit(_read, files, records[0]) if records else None
        for index in range(len(records)):
            assert coming is not None
            applications = coming.result()
            coming = pool.submit(_read, files, records[index + 1]) if index + 1 < len(records) else None
            for application in applications:
                _apply(application, state)
        if tails:
            tail = _tail(files, tails[-1])
            for groups, optimizer in zip(tail["groups"], state.optimizers, strict=True):
                set_groups(groups, optimizer)
            state.apply_small(tail)
    return tail


def _read(files: Files, record: Record) -> list[dict[str, Any]]:
    what = f"the record of step {record.step}"
    blobs = split(bytearray(record.payload(files)), what)[:-1]
    applications = [read_blob(one, what) for one in blobs]
    return [{**one, "gradients": decode(one["gradients"])} for one in applications]


def _tail(files: Files, record: Record) -> dict[str, Any]:
    what = f"the record of step {record.step}"
    tail = read_blob(split(bytearray(record.payload(files)), what)[-1], what)
    if not isinstance(tail, dict):
        raise Damaged(f"{what} ends with a {type(tail).__name__}")
    return tail


def _apply(application: dict[str, Any], state: TrainingState) -> None:
    if application["skipped"]:
        return
    optimizer, gradients = state.optimizers[application["optimizer"]], application["gradients"]
    set_groups(application["groups"], optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = gradients.get(state.names[id(parameter)])
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@contextmanager
def _without_hooks(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """A wire, a policy or a log must not take these for steps of the training."""
    kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    kept = [{kind: dict(getattr(one, kind)) for kind in kinds} for one in optimizers]
    try:
        for one in optimizers:
            for kind in kinds:
                getattr(one, kind).clear()
        yield
    finally:
        for one, hooks in zip(optimizers, kept, strict=True):
            for kind in kinds:
                getattr(one, kind).update(hooks[kind])
