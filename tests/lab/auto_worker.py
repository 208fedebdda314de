"""One host of ``test_auto_on_lab``: trains with ``compress="auto"`` and tells, step by step, which plan is in force."""

import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire

BACKWARD_S = 0.2  # so long that what compressors save at 1 Gbit/s, 2 to 4 ms, is within the margin for dense
STEPS = 400


class Work(torch.autograd.Function):
    """Stands for the backward pass of many small layers: time in which the gradients behind it may travel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(BACKWARD_S)
        return gradients[0]


class Net(nn.Module):
    """0.82 MB of gradients that are ready early; what is ready last is so small that it is always sent dense."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(2, 256), nn.Linear(256, 800)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.large(Work.apply(self.small(x)))  # type: ignore[no-untyped-call]
        return result


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
    after = 0
    with thinwire.attach(model, optimizer, fuse="none") as wire:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            plan = wire.plan
            print(json.dumps({"step": step, "compress": None if plan is None else plan.compress}), flush=True)
            after += plan is not None and plan.compress != "dense"
            if after == 3:
                break
    total = float(sum(p.detach().double().sum() for p in model.parameters()))
    print(json.dumps({"checksum": total, "steps": step}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
