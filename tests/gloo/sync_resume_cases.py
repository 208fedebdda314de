"""Cases: runs with local steps that are killed while deltas are under way end with the bits of those that are not.

The suite is launched twice with the same folder, as ``resume_cases``.
"""

from __future__ import annotations

import torch
from torch import nn

import thinwire
from gloo.resume_cases import hash_of
from gloo.support import ENGINES, Case, Net, Rank, digest, seeded, train, wrap

HALF, WHOLE = 5, 10
SPECS = ("stream", "stream(bits=4, slices=3, delay=2, start=2)", "diloco(h=4, delay=2, compress='int4')")
CASES: dict[str, Case] = {}


def _resume(spec: str, engine: str) -> Case:
    def run(rank: Rank) -> str:
        model = wrap(engine, seeded(Net))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        path = rank.folder / f"{hash_of(spec + engine)}-{rank.index}.pt"
        with thinwire.attach(model, optimizer, sync=spec) as wire:
            if path.exists():
                saved = torch.load(path, weights_only=True)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                wire.load_state_dict(saved["wire"])
            else:
                train(model, optimizer, rank.index, range(HALF))
                everything = _everything(model, optimizer, wire)
                assert wire.state_dict()["sync"]["deltas"]["flights"], "nothing is under way"
                torch.save(everything, path)
            train(model, optimizer, rank.index, range(HALF, WHOLE))
            return digest(_everything(model, optimizer, wire))

    return run


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer, wire: thinwire.Attached) -> dict[str, object]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "wire": wire.state_dict()}


for _spec in SPECS:
    for _engine in ENGINES:
        CASES[f"{_spec} [{_engine}]"] = _resume(_spec, _engine)
