"""One host of ``test_pairs_on_lab``: a long all-to-all pair by pair and all at once, in turns."""

import json
import time

import torch
import torch.distributed as dist

from thinwire.comm import Tag, TorchDistTransport
from thinwire.core import AllToAll

ROUNDS = 4
PAIR_BYTES = 1_500_000

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = TorchDistTransport(dist.new_group())
    messages = torch.zeros((dist.get_world_size(), PAIR_BYTES), dtype=torch.uint8)
    reply = torch.empty_like(messages)
    contestants = {
        "pairs": lambda: transport.start(AllToAll(messages), Tag()).wait(),
        "at once": lambda: dist.all_to_all_single(reply, messages),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name, exchange in contestants.items():
            dist.barrier()
            began_s = time.perf_counter()
            exchange()
            dist.barrier()
            seconds[name].append(time.perf_counter() - began_s)
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()
