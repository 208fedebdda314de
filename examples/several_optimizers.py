"""Two optimizers for one model: pass both, and a NaN on any rank skips both on all.

torchrun --nproc-per-node 2 examples/several_optimizers.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import thinwire


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    body, head = nn.Sequential(nn.Linear(128, 256), nn.ReLU()), nn.Linear(256, 10)
    model = nn.Sequential(body, head)
    optimizers = [torch.optim.AdamW(body.parameters(), lr=1e-3), torch.optim.SGD(head.parameters(), lr=0.1)]
    data = torch.Generator().manual_seed(dist.get_rank())
    with thinwire.attach(model, optimizers, compress="int8") as wire:
        for step in range(options.steps):
            x = torch.randn(64, 128, generator=data)
            if step == 1 and dist.get_rank() == 0:
                x[0, 0] = float("nan")  # one bad batch on one rank
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.3f}, skipped {wire.stats().skipped_steps} step on all ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
