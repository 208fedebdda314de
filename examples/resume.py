"""Save in the middle, resume, and end with the same bits as a run that never stopped.

torchrun --nproc-per-node 2 examples/resume.py --steps 40
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire


def train(first: int, last: int, *, load: Path | None = None, save: Path | None = None) -> Tensor:
    """Train from step ``first`` to ``last``; the weights of the first layer at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with thinwire.attach(model, optimizer, compress="int4") as wire:
        if load is not None:
            state = torch.load(load, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            wire.load_state_dict(state["wire"])
        for step in range(first, last):
            data = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
            x = torch.randn(64, 128, generator=data)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1)).backward()
            optimizer.step()
        if save is not None:
            # Residuals differ from rank to rank, so every rank saves its own state.
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "wire": wire.state_dict()}
            torch.save(state, save)
    return model[0].weight.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / f"rank{dist.get_rank()}.pt"
        whole = train(0, options.steps)
        train(0, options.steps // 2, save=saved)
        resumed = train(options.steps // 2, options.steps, load=saved)
    assert torch.equal(whole, resumed)
    if dist.get_rank() == 0:
        print("the resumed run sent and learned the same, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
