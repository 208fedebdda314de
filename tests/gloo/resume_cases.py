"""Cases: a run that is killed and resumed ends with the same bits as one that is not.

The suite is launched twice with the same folder: the first launch trains through and leaves a checkpoint half-way, the
second, in new processes, goes on from it. Both return a digest of everything at the end.
"""

from __future__ import annotations

import torch
from torch import nn

import thinwire
from gloo.support import ENGINES, Case, Net, Rank, digest, seeded, specs, train, wrap

HALF, WHOLE = 3, 6
CASES: dict[str, Case] = {}


def _resume(text: str, engine: str) -> Case:
    def run(rank: Rank) -> str:
        # Small buckets: DDP arranges them anew after its first step, so a resumed run begins with other ones.
        model = wrap(engine, seeded(Net), **({"bucket_cap_mb": 0.006} if engine == "ddp" else {}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        path = rank.folder / f"{abs(hash_of(text + engine))}-{rank.index}.pt"
        with thinwire.attach(model, optimizer, compress=text, fuse="12KiB") as wire:
            if path.exists():
                saved = torch.load(path, weights_only=True)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                wire.load_state_dict(saved["wire"])
            else:
                train(model, optimizer, rank.index, range(HALF))
                torch.save(_everything(model, optimizer, wire), path)
            train(model, optimizer, rank.index, range(HALF, WHOLE))
            return digest(_everything(model, optimizer, wire))

    return run


def hash_of(text: str) -> int:
    """Stable over processes, unlike the built-in one."""
    return int(digest({"text": text})[:12], 16)


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer, wire: thinwire.Attached) -> dict[str, object]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "wire": wire.state_dict()}


for _text in specs():
    for _engine in ENGINES:
        CASES[f"{_text} [{_engine}]"] = _resume(_text, _engine)
