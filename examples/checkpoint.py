"""Recoverable points in any PyTorch loop: stop it whenever you like, start it again, and it goes on.

    python examples/checkpoint.py --directory runs/checkpoints

thinwire is not attached here: no gradient is compressed and no process group is needed.
"""

import argparse

import torch
from torch import nn

from thinwire.checkpoint import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--directory", default="runs/checkpoints")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    data = torch.Generator().manual_seed(1)  # whatever knows the position in your data: a sampler, a loader, a counter

    extra = {"scheduler": scheduler, "data": data}
    with Checkpointer(options.directory, model, optimizer, extra=extra, every=50, log=True) as checkpoints:
        start = checkpoints.restore()  # 0 if there is nothing yet
        print(f"starting at step {start}")
        for step in range(start, options.steps):
            x = torch.randn(64, 128, generator=data)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
            loss.backward()
            optimizer.step()
            scheduler.step()
            checkpoints.maybe_save(step + 1)  # every step a point of the log, every 50th a full checkpoint
            if (step + 1) % 50 == 0:
                print(f"step {step + 1}: loss {loss.item():.3f}")
    x = torch.randn(1024, 128, generator=torch.Generator().manual_seed(2))
    print(
        f"after {options.steps} steps: loss {nn.functional.cross_entropy(model.eval()(x), x[:, :10].argmax(dim=1)):.3f}"
    )


if __name__ == "__main__":
    main()
