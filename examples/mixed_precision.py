"""fp16 autocast with a GradScaler: thinwire knows the scale, so residuals survive when it changes.

torchrun --nproc-per-node 2 examples/mixed_precision.py
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
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")  # or thinwire.amp.layer_scaler(model), with a scale per layer
    data = torch.Generator().manual_seed(dist.get_rank())
    with thinwire.attach(model, optimizer, compress="int4", scaler=scaler) as wire:
        for _ in range(options.steps):
            x = torch.randn(64, 128, generator=data)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x).float(), x[:, :10].argmax(dim=1))
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # an overflow on any rank skips the step on all
            scaler.update()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.3f}, scale {scaler.get_scale():g}, skipped {wire.stats().skipped_steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
