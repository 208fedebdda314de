"""Gradient accumulation: four backward passes, one exchange.

torchrun --nproc-per-node 2 examples/accumulation.py
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

import thinwire

PASSES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    with thinwire.attach(model, optimizer, compress="int8") as wire:
        for _ in range(options.steps):
            optimizer.zero_grad()
            for number in range(PASSES):
                x = torch.randn(32, 128, generator=data)
                # Inside no_sync() gradients only accumulate; the last pass averages their sum.
                with nullcontext() if number == PASSES - 1 else wire.no_sync():
                    loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1)) / PASSES
                    loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(
                f"loss {PASSES * loss.item():.3f}: {wire.stats().steps} exchanges for {PASSES * options.steps} passes"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
