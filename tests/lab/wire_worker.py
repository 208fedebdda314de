"""One host of ``test_wire_on_lab``: a few steps per compressor, with bytes from the interface and from thinwire."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import thinwire

sys.path.insert(0, str(Path(__file__).parent))
from wire_specs import SPECS, STEPS

# Ethernet, IP and TCP with time stamps; large segments count as one packet with one header.
HEADER_BYTES = 66


def measure(compress: str) -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with thinwire.attach(model, optimizer, compress=compress) as wire:
        x = torch.randn(8, 512, generator=torch.Generator().manual_seed(dist.get_rank()))
        dist.barrier()
        counted, told, step_s = _interface(), wire.stats().wire_bytes, []
        for _ in range(STEPS):
            began_s = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            step_s.append(time.perf_counter() - began_s)
        dist.barrier()  # until then the last bytes may wait in the queue of an interface
        return {
            "step_s": min(step_s),  # what the link allows; other jobs on the machine only add to it
            "interface_bytes": _interface() - counted,
            "wire_bytes": wire.stats().wire_bytes - told,
            "checksum": float(sum(p.detach().double().sum() for p in model.parameters())),
        }


def _interface() -> int:
    """What the interfaces but loopback have sent, without the headers of the network."""
    rows = (line.split(":", 1) for line in Path("/proc/self/net/dev").read_text().splitlines() if ":" in line)
    sent = [columns.split()[8:10] for name, columns in rows if name.strip() != "lo"]
    return sum(int(count_bytes) - HEADER_BYTES * int(packets) for count_bytes, packets in sent)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for spec in SPECS:
        print(json.dumps({"spec": spec, **measure(spec)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
