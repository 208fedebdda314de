"""Streamed averaging over a slow link: workers step at once, and one slice of the weights is averaged per step in few bits.

torchrun --nproc-per-node 2 examples/stream.py
torchrun --nproc-per-node 2 examples/stream.py --sync "diloco(h=20)"
"""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire


def batches(rank: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A small learnable task: which of ten inputs is the largest?"""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(64, 128, generator=generator)
        yield x, x[:, :10].argmax(dim=1)


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """The loss on data that nobody trains on."""
    x, y = next(batches(rank=1000, steps=1))
    return nn.functional.cross_entropy(model(x), y).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sync", default="stream(slices=2, bits=2)", help="a policy, see thinwire.sync.policies()")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    with thinwire.attach(model, optimizer, sync=options.sync) as wire:
        if rank == 0:
            print(wire.explain())
        for step, (x, y) in enumerate(batches(rank, options.steps)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()  # gradients stay on this rank
            wire.report_loss(loss)  # only some policies look at it
            optimizer.step()  # moves the weights at once, takes in one slice's mean and sends the next slice
            scheduler.step()
            if rank == 0 and (step + 1) % 50 == 0:
                with wire.averaged():  # the weights that all ranks agree on; nothing is sent, so rank 0 may come alone
                    print(f"step {step + 1}: loss {evaluate(model):.3f}")
        with wire.averaged(exact=True):  # the mean of the replicas: all ranks come here. The place to save the model
            if rank == 0:
                print(f"at the end: loss {evaluate(model):.3f}")
        stats = wire.stats()
        if rank == 0:
            print(
                f"sent {stats.wire_bytes / 1e6:.1f} MB in {stats.steps} averages, waited {stats.wait_s:.2f} s for them"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
