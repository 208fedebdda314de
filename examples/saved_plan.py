"""Use a plan that was made elsewhere, such as by ``thinwire plan train:make --json plan.json``.

torchrun --nproc-per-node 2 examples/saved_plan.py --plan plan.json
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire.plan import Cluster, Plan, choose, measure_codec, network_of_link, parse_link, profile_model

CANDIDATES = ("dense", "bf16", "int8", "int4")


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))


def plan_here() -> Plan:
    """What ``thinwire plan`` does: profile the model on one rank, and price it for links of 100 Mbit/s and 1 ms."""
    batch = torch.randn(64, 128), torch.randint(10, (64,))
    profile = profile_model(make_model(), batch, _loss, specs=CANDIDATES)
    network = network_of_link(parse_link("100mbit,1ms"), world_size=2)
    codecs = {spec: measure_codec(spec) for spec in CANDIDATES}
    return choose(profile, network, codecs, Cluster(world_size=2, cores=2))


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, help="a plan as JSON; without it, rank 0 makes one and broadcasts it")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    if options.plan is not None:
        plan = Plan.load(options.plan)
    else:
        # Measurements differ between ranks, and all ranks must use the same plan.
        made = [plan_here().to_json() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(made)
        assert made[0] is not None
        plan = Plan.from_json(made[0])
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    with thinwire.attach(model, optimizer, plan=plan) as wire:  # no dense steps, no measuring
        for _ in range(options.steps):
            x = torch.randn(64, 128, generator=data)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1)).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"sent with {plan.compress}, fuse={plan.fuse}: {wire.stats().wire_bytes / 1e3:.0f} kB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
