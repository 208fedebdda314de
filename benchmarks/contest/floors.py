"""How long a step computes here, for estimates: timed for a second or so before the contest."""

from __future__ import annotations

import time

import torch
from torch import nn

from thinwire.demo.data import Corpus, batch_starts, windows_at
from thinwire.demo.model import build_model
from thinwire.demo.settings import Workload
from thinwire.plan import Cluster
from thinwire.plan.cluster import usable_cores

TIMED_STEPS = 2  # after one that allocates


def make_model(workload: Workload) -> nn.Module:
    """As the workers build it."""
    return build_model(workload.model, workload.seq, workload.seed)


def floor_s(workload: Workload, corpus: Corpus, hosts: int) -> float:
    """Seconds of forward, backward and optimizer with one thread, as long as they take when all hosts share the cores."""
    model = make_model(workload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate, fused=True)
    starts = batch_starts(len(corpus.train), workload.seq, 0, 0, 1, workload.batch, workload.seed)
    inputs, targets = windows_at(corpus.train, starts, workload.seq)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fastest_s = float("inf")
        for _ in range(1 + TIMED_STEPS):
            began_s = time.perf_counter()
            optimizer.zero_grad()
            model(inputs, targets).backward()
            optimizer.step()
            fastest_s = min(fastest_s, time.perf_counter() - began_s)
    finally:
        torch.set_num_threads(threads)
    return fastest_s * Cluster(world_size=hosts, ranks_per_machine=hosts, cores=usable_cores()).slowdown
