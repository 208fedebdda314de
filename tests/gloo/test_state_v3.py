"""States written by version 3 (before channels and transactions) load, and training goes on as it did there, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire

# Written by commit f140a36 on one rank: state and weights after 4 steps, and the weights 3 steps later.
SAVED: dict[str, dict[str, Any]] = torch.load(Path(__file__).parent / "data" / "state_v3.pt", weights_only=True)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 56), nn.ReLU(), nn.Linear(56, 40), nn.Tanh(), nn.Linear(40, 3))


@pytest.mark.filterwarnings("ignore:SGD does not know")
@pytest.mark.parametrize("spec", SAVED)
def test_training_goes_on(single_rank_group: None, spec: str) -> None:
    saved, net = SAVED[spec], model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with thinwire.attach(net, optimizer, compress=spec, fuse=saved["fuse"]) as wire:
        net.load_state_dict(saved["weights"])
        wire.load_state_dict(saved["state"])
        for index in range(4, 7):
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(index))
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        assert wire.state_dict()["version"] == 5
        assert wire.state_dict()["step"] == 7
    for name, weight in net.state_dict().items():
        assert torch.equal(weight, saved["later"][name]), name
