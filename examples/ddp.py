"""An existing DDP script with one line added.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", default="int4", help="a compressor, see 'thinwire compressors'")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Small buckets start travelling early; DDP's default of 25 MB would hold a small model back until the end of backward.
    model = DistributedDataParallel(nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10)), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wire = thinwire.attach(model, optimizer, compress=options.compress)  # the one line

    data = torch.Generator().manual_seed(rank)
    for _ in range(options.steps):
        x = torch.randn(64, 128, generator=data)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # sees the averaged gradients
        optimizer.step()

    if rank == 0:
        print(f"loss {loss.item():.3f} after {options.steps} steps; {wire.stats()}")
    wire.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
