"""A plain module with thinwire in place of DDP. The same file runs on one machine and on many:

torchrun --nproc-per-node 2 examples/plain_module.py
torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST0:29400 examples/plain_module.py
sbatch examples/slurm.sh
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", default="auto", help="a compressor, see 'thinwire compressors'")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with thinwire.attach(model, optimizer, compress=options.compress) as wire:
        if dist.get_rank() == 0:
            print(wire.explain())
        for step, (x, y) in enumerate(batches(dist.get_rank(), options.steps)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()  # when it returns, every gradient is the mean over the ranks
            optimizer.step()
            if dist.get_rank() == 0 and (step + 1) % 50 == 0:
                print(f"step {step + 1}: loss {loss.item():.3f}")
        stats = wire.stats()
        if dist.get_rank() == 0:
            print(f"sent {stats.wire_bytes / 1e6:.1f} MB, {stats.reduction_factor:.1f} times less than dense")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
