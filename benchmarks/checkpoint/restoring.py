"""How long it takes to get a state back, and how long writes of different sizes take."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from benchmarks.checkpoint.model import make, train_step
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from thinwire.checkpoint import Checkpointer


@dataclass(frozen=True)
class Timing:
    """Median and worst of some repetitions, in seconds."""

    name: str
    n: int
    median_s: float
    worst_s: float


def restores(n: int) -> list[Timing]:
    """The same 24 M parameters with Adam, from the page cache, in turns."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="thinwire-restore-"))
    try:
        model, optimizer = make()
        train_step(model, optimizer, 0, 1)
        with Checkpointer(folder / "thinwire", model, optimizer) as checkpoints:
            checkpoints.save(1)
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "dcp")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "torch.pt")

            def from_dcp() -> None:
                weights, moments = get_state_dict(model, optimizer)
                state = {"model": weights, "optimizer": moments}
                dcp.load(state, checkpoint_id=folder / "dcp")
                set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

            def from_torch() -> None:
                state = torch.load(folder / "torch.pt", weights_only=True)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])

            ways: dict[str, Callable[[], object]] = {
                "thinwire restore": checkpoints.restore, "dcp.load": from_dcp, "torch.load": from_torch,
            }  # fmt: skip
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(n + 1):
                for name, way in ways.items():
                    started_s = time.perf_counter()
                    way()
                    times[name].append(time.perf_counter() - started_s)
        return [Timing(name, n, statistics.median(took[1:]), max(took[1:])) for name, took in times.items()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def flushes(total_bytes: int, sizes: list[int], n: int) -> list[Timing]:
    """A checkpoint written and synced in pieces of each size, with the checksums that go with it."""
    from thinwire.checkpoint.commit import write_shard
    from thinwire.checkpoint.files import LocalFiles

    folder = Path(tempfile.mkdtemp(prefix="thinwire-flush-"))
    data = os.urandom(1 << 20) * (total_bytes >> 20)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    try:
        for _ in range(n):
            for size in sizes:
                started_s = time.perf_counter()
                write_shard(LocalFiles(folder), ".", 0, data, size)
                times[size].append(time.perf_counter() - started_s)
                (folder / "rank-00000.safetensors").unlink()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [Timing(f"{size >> 20} MiB", n, statistics.median(took), max(took)) for size, took in times.items()]
