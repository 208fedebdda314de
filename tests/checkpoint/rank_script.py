"""One rank of a training with a wire and a checkpointer; started by ``test_ranks.py``. Prints one line of JSON."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.checkpoint import Checkpointer


def main(options: dict[str, Any], rank: int) -> None:
    torch.set_num_threads(1)
    world_size = options["world_size"]
    dist.init_process_group("gloo", init_method=f"file://{options['store']}", rank=rank, world_size=world_size)
    torch.manual_seed(rank)  # dropout differs between ranks: each has random numbers of its own
    model: nn.Module = nn.Sequential(
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 4)
    )
    wire = None
    if options["engine"] == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if options["engine"] != "ddp":
        wire = thinwire.attach(model, optimizer, compress=options["engine"])
    settings = {"every": options["every"], "log": options["log"], "shared": options["shared"]}
    checkpoints = Checkpointer(options["directory"], model, optimizer, wire, **settings)
    start = checkpoints.restore(residuals=options["residuals"])
    for step in range(start, options["steps"]):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
        checkpoints.maybe_save(step + 1)
        checkpoints.wait()
        if options["kill"] == [rank, step + 1]:
            os.kill(os.getpid(), signal.SIGKILL)
    state = {**model.state_dict(), "rng": torch.get_rng_state()}
    moments = [value for kept in optimizer.state.values() for value in kept.values()]
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in [*state.values(), *moments])).hexdigest()
    residuals = hashlib.sha256(repr(wire.state_dict() if wire else "").encode()).hexdigest()
    restored = checkpoints.restored
    checkpoints.close()
    if wire is not None:
        wire.detach()
    found = {"lost": restored.lost, "exact": restored.exact} if restored else {}
    print(json.dumps({"start": start, "digest": digest, "wire": residuals, "failures": checkpoints.failures, **found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
