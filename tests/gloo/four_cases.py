"""Cases for four ranks: everything of ``wire_cases``, and PowerSGD over many groups."""

from __future__ import annotations

import torch
from torch import nn

import thinwire
from gloo.support import ENGINES, Case, Net, Rank, digest, seeded, train, wrap
from gloo.wire_cases import CASES as WIRE_CASES

STEPS = {"ddp": 200, "plain": 50}
CASES: dict[str, Case] = dict(WIRE_CASES)


class Deep(nn.Module):
    """Enough matrices for many buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24)) for _ in range(2)))
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.net(self.blocks(x))
        return result


def _powersgd(engine: str) -> Case:
    def run(rank: Rank) -> str:
        """Many buckets, two rounds each: the ranks must not interleave them differently."""
        model = wrap(engine, seeded(Deep), **({"bucket_cap_mb": 0.004} if engine == "ddp" else {}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with thinwire.attach(model, optimizer, compress="powersgd(rank=4)", fuse="none") as wire:
            train(model, optimizer, rank.index, range(STEPS[engine]))
            assert wire.stats().steps == STEPS[engine]
            assert all(bool(p.isfinite().all()) for p in model.parameters())
        return digest(dict(model.named_parameters()))

    return run


for _engine in ENGINES:
    CASES[f"powersgd over many groups, {STEPS[_engine]} steps [{_engine}]"] = _powersgd(_engine)
