"""A third-party optimizer that asks for ages: Lion (Chen et al. 2023) in forty lines.

A sparsifier delivers a coordinate once in a while, as the sum of what has accumulated since. `wire_of(parameter)` finds the
wire, `wire.received(parameter)` says what has just arrived and how many steps it stands for.

torchrun --nproc-per-node 2 examples/third_party_optimizer.py
"""

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from thinwire.optim import wire_of


class Lion(torch.optim.Optimizer):
    """Lion whose steps stand for as many steps as what arrived has waited."""

    reads_ages = True  # tells `thinwire.attach` that a sparsifier needs no warning here

    def __init__(
        self, params: Iterator[nn.Parameter], lr: float = 3e-4, beta1: float = 0.9, beta2: float = 0.99
    ) -> None:
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["beta1"], group["beta2"])

    def _update(self, weight: Tensor, grad: Tensor, lr: float, beta1: float, beta2: float) -> None:
        momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
        wire = wire_of(weight)
        received = None if wire is None else wire.received(weight)
        if received is None:  # everything has arrived, one step old: plain Lion
            weight.sub_(lr * torch.lerp(grad, momentum, beta1).sign())
            momentum.lerp_(grad, 1 - beta2)
            return
        at = received.mask  # everything else keeps its weight and its momentum
        age = received.ages[at].float()
        mean = grad[at] / age  # what arrived is a sum of `age` gradients
        weight[at] -= lr * age * torch.lerp(mean, momentum[at], beta1**age).sign()
        momentum[at] = torch.lerp(mean, momentum[at], beta2**age)


def batches(rank: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A small learnable task: which of ten inputs is the largest?"""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(64, 128, generator=generator)
        yield x, x[:, :10].argmax(dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", default="topk(density=0.05)", help="a compressor, see 'thinwire compressors'")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = Lion(model.parameters())
    with thinwire.attach(model, optimizer, compress=options.compress):
        for step, (x, y) in enumerate(batches(dist.get_rank(), options.steps)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0 and ((step + 1) % 50 == 0 or step + 1 == options.steps):
                print(f"step {step + 1}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
