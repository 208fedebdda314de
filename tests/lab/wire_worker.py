"""One host of ``test_wire_on_lab``: a few steps per compressor, with bytes from the interface and from thinwire."""

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire.demo.contender import interface_sent_bytes

STEPS = 4


def measure(compress: str) -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with thinwire.attach(model, optimizer, compress=compress) as wire:
        x = torch.randn(8, 512, generator=torch.Generator().manual_seed(dist.get_rank()))
        dist.barrier()
        counted, told, began_s = _interface(), wire.stats().wire_bytes, time.perf_counter()
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return {
            "step_s": (time.perf_counter() - began_s) / STEPS,
            "interface_bytes": _interface() - counted,
            "wire_bytes": wire.stats().wire_bytes - told,
            "checksum": float(sum(p.double().sum() for p in model.parameters())),
        }


def _interface() -> int:
    return interface_sent_bytes(Path("/proc/self/net/dev").read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for spec in ("dense", "bf16", "int4", "topk(density=0.01)", "powersgd(rank=4)"):
        print(json.dumps({"spec": spec, **measure(spec)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
