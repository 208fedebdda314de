"""A loop that survives ``kill -9`` of any of its ranks. Nothing in it knows about failures: torchrun starts all ranks again,
and they agree on the newest point that all of them can load.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or ranks that start again may try to reach those that were killed
    torchrun --standalone --nproc-per-node 4 --max-restarts 100 examples/restarts.py --directory runs/restarts

In another terminal: ``pkill -9 -n -f examples/restarts.py``, as often as you like.
"""

import argparse
import hashlib
import logging
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from thinwire.checkpoint import Checkpointer


def batch(step: int, rank: int) -> Tensor:
    """Data by position: after a restart the same steps see the same data."""
    return torch.randn(32, 128, generator=torch.Generator().manual_seed(1000 * step + rank))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--directory", default="runs/restarts")
    parser.add_argument("--compress", default="dense", help="a compressor, see 'thinwire compressors'")
    parser.add_argument("--every", type=int, default=50, help="steps from one full checkpoint to the next")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="make steps longer, to be killed in them")
    options = parser.parse_args()

    logging.basicConfig(level=logging.WARNING)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wire = thinwire.attach(model, optimizer, compress=options.compress)

    with Checkpointer(options.directory, model, optimizer, wire, every=options.every, log=True) as checkpoints:
        start = checkpoints.restore()
        if checkpoints.restored is not None and rank == 0:
            print(f"restored step {start}, {checkpoints.restored.lost} steps lost", flush=True)
        for step in range(start, options.steps):
            x = batch(step, rank)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
            loss.backward()
            optimizer.step()
            time.sleep(options.step_seconds)
            checkpoints.maybe_save(step + 1)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    if rank == 0:
        print(f"step {options.steps}: loss {loss.item() if start < options.steps else 0:.3f}, weights {digest[:16]}")
    wire.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
