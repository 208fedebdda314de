"""Cases of groups that change while training: agreement, the plan in the state, and the trace behind it."""

from __future__ import annotations

import threading

import torch

import thinwire
from gloo.four_cases import Deep
from gloo.support import ENGINES, Case, Cases, Rank, digest, error_of, seeded, train, wrap

CASES = Cases()
STEPS = 14  # planned after 11


def _planned(fuse: str, engine: str) -> Case:
    def run(rank: Rank) -> object:
        """All ranks take over rank 0's plan at the same step and stay bit-identical."""
        model = wrap(engine, seeded(Deep))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with thinwire.attach(model, optimizer, compress="topk(density=0.2)", fuse=fuse) as wire:
            before = wire.state_dict()["fusion"]
            train(model, optimizer, rank.index, range(STEPS))
            plan = wire.state_dict()["fusion"]
            trace = wire.trace()
        names = [name for group in plan for name in group["names"]]
        assert sorted(names) == sorted(name for group in before for name in group["names"])
        assert trace.step == STEPS - 1
        assert {span.activity for span in trace.spans} >= {"encode", "wire", "decode", "wait"}
        if fuse.startswith("ssfusion"):
            assert any(group["density"] is not None for group in plan)
        assert any(group["hosted"] for group in plan) == fuse.endswith("+host")
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("thinwire")]
        return digest(dict(model.named_parameters())), plan

    return run


for _engine in ENGINES:
    for _fuse in ("safusion", "ssfusion", "ssfusion+host", "optimal"):
        CASES[f"{_fuse} plans from measured steps [{_engine}]"] = _planned(_fuse, _engine)


@CASES.both
def a_loaded_plan_is_used(rank: Rank, engine: str) -> object:
    """The groups of a checkpoint replace those of the settings, so blocks begin where they began."""
    model = wrap(engine, seeded(Deep))
    with thinwire.attach(model, compress="int4", fuse="none") as wire:
        state = wire.state_dict()
        merged = {"names": [n for g in state["fusion"] for n in g["names"]], "dense": [], "density": None}
        wire.load_state_dict({**state, "fusion": [merged]})
        train(model, torch.optim.SGD(model.parameters(), lr=0.05), rank.index, range(2))
        assert {span.group for span in wire.trace().spans if span.activity == "encode"} == {0}
        foreign = [{**merged, "names": ["somebody.else"]}]
        error_of(thinwire.CheckpointError, lambda: wire.load_state_dict({**state, "fusion": foreign}))
    return digest(dict(model.named_parameters()))


@CASES.plain
def ssfusion_needs_a_density(rank: Rank, engine: str) -> str:
    scheduled = "topk(density=warmup(0.2, 0.1, steps=5))"
    return "; ".join(
        str(error_of(thinwire.ConfigError, lambda: thinwire.attach(seeded(Deep), compress=compress, fuse="ssfusion")))  # noqa: B023
        for compress in ("int4", scheduled)
    )
