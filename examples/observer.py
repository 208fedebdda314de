"""An observer that watches every step, and metrics for a tracker.

torchrun --nproc-per-node 2 examples/observer.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire.observe import Observer, StepReport
from thinwire.plan import Plan


class Longest(Observer):
    """Remembers the step in which training waited longest. All calls arrive in the training thread."""

    def __init__(self) -> None:
        self.step, self.wait_s = -1, -1.0

    def on_step(self, report: StepReport) -> None:
        if report.wait_s > self.wait_s:
            self.step, self.wait_s = report.index, report.wait_s

    def on_plan(self, step: int, plan: Plan) -> None:
        if dist.get_rank() == 0:
            print(f"from step {step} on: {plan.compress}, fuse={plan.fuse}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", default="int8")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    longest = Longest()
    data = torch.Generator().manual_seed(dist.get_rank())
    with thinwire.attach(model, optimizer, compress=options.compress, observers=[longest]) as wire:
        for _ in range(options.steps):
            x = torch.randn(64, 128, generator=data)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1)).backward()
            optimizer.step()
        metrics = wire.metrics()  # flat names and numbers: tracker.log(metrics)
    if dist.get_rank() == 0:
        print(f"step {longest.step} waited longest: {1e3 * longest.wait_s:.1f} ms")
        print(
            f"sent {metrics['thinwire/wire_bytes'] / 1e3:.0f} kB per step, waited {metrics['thinwire/exposed_s']:.4f} s"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
