"""A sparsifier with thinwire's AdamW, which corrects for the age of each update. Experimental: try int4 first.

torchrun --nproc-per-node 2 examples/sparse_adamw.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import thinwire


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", default="topk(density=exp(0.5, 0.05, steps=30), score='update') | fp16")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = thinwire.optim.AdamW(model.parameters(), lr=1e-3)  # in place of torch.optim.AdamW
    data = torch.Generator().manual_seed(dist.get_rank())
    with thinwire.attach(model, optimizer, compress=options.compress) as wire:
        for _ in range(options.steps):
            x = torch.randn(64, 128, generator=data)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
            loss.backward()
            optimizer.step()
        received = wire.received(model[0].weight)
        if dist.get_rank() == 0 and received is not None:
            arrived = received.mask.float().mean().item()
            print(f"loss {loss.item():.3f}; {100 * arrived:.0f} % of the first weight arrived in the last step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
