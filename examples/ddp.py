"""An existing DDP script with one line added.

    torchrun --nproc-per-node 2 examples/ddp.py

Also shows what checkpoints need: thinwire's state is per rank, so every rank saves its own.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", default="powersgd(rank=4)", help="a compressor, see 'thinwire compressors'")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoints", type=Path, help="directory to save to, and to go on from if it holds a state")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Small buckets start travelling early; DDP's default of 25 MB would hold a small model back until the end of backward.
    model = DistributedDataParallel(nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10)), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wire = thinwire.attach(model, optimizer, compress=options.compress)  # the one line

    saved = options.checkpoints / f"rank{rank}.pt" if options.checkpoints else None
    start = 0
    if saved is not None and saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        wire.load_state_dict(state["wire"])
        start = state["step"]

    for step in range(start, options.steps):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        x = torch.randn(64, 128, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # sees the averaged gradients
        optimizer.step()

    if saved is not None:
        saved.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "wire": wire.state_dict()}
        torch.save({**state, "step": options.steps}, saved)
    if rank == 0:
        print(f"loss {loss.item():.3f} after {options.steps} steps; {wire.stats()}")
    wire.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
