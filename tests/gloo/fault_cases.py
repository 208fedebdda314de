"""Cases: ranks that differ, messages that break. Three ranks; every rank must name the same culprit."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from gloo.support import ENGINES, Case, Net, Rank, digest, error_of, loss_of, seeded, sgd, train, wrap
from thinwire.comm import Faulty, Tag, TorchDistTransport, pairs
from thinwire.core import AllToAll

CASES: dict[str, Case] = {}


def _wide() -> nn.Module:
    net = Net()
    net.last = nn.Linear(40, 5)
    return net


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "compressor": (Net, {"compress": "topk(density=0.02)"}),
    "fusion": (Net, {"compress": "topk", "fuse": "none"}),
    "seed": (Net, {"compress": "topk", "seed": 1}),
    "buffers": (Net, {"compress": "topk", "broadcast_buffers": False}),
    "shape": (_wide, {"compress": "topk"}),
    "dtype": (lambda: Net().to(torch.bfloat16), {"compress": "topk"}),
}


def _different(what: str, culprit: int) -> Case:
    def run(rank: Rank) -> None:
        make_model, arguments = DIFFERENT[what] if rank.index == culprit else (Net, {"compress": "topk"})
        error = error_of(thinwire.DesyncError, lambda: thinwire.attach(seeded(make_model), **arguments))
        assert isinstance(error, thinwire.DesyncError)
        assert error.rank == culprit, str(error)
        assert f"rank {culprit} is out of step" in str(error)

    return run


for _what in DIFFERENT:
    for _culprit in (0, 2):
        CASES[f"different {_what} on rank {_culprit}"] = _different(_what, _culprit)


REDUCING = ("dense", "powersgd(rank=2)")


def _corrupt(text: str, engine: str) -> Case:
    def run(rank: Rank) -> str:
        model = wrap(engine, seeded(Net))
        optimizer = sgd(model)
        transport = Faulty(TorchDistTransport(dist.new_group()), corrupt_at=[2] if rank.index == 1 else [])
        with thinwire.attach(model, optimizer, compress=text, transport=transport) as wire:
            train(model, optimizer, rank.index, range(2))
            before = digest({"weights": model.state_dict(), "wire": wire.state_dict()["tensors"]})
            error = error_of(thinwire.DesyncError, lambda: train(model, optimizer, rank.index, [2]))
            assert isinstance(error, thinwire.DesyncError)
            assert (error.rank, error.field) == (1, "checksum"), str(error)
            assert "step 2" in str(error)
            assert before == digest({"weights": model.state_dict(), "wire": wire.state_dict()["tensors"]})
        return digest(model.state_dict())

    return run


for _text in ("topk(density=0.1)", "int4"):  # reductions carry no checksum
    for _engine in ENGINES:
        CASES[f"corrupt message: {_text} [{_engine}]"] = _corrupt(_text, _engine)


def _out_of_step(text: str, engine: str) -> Case:
    def run(rank: Rank) -> None:
        """Rank 2 has loaded an older checkpoint than the others."""
        model = wrap(engine, seeded(Net))
        optimizer = sgd(model)
        with thinwire.attach(model, optimizer, compress=text) as wire:
            older = wire.state_dict()
            train(model, optimizer, rank.index, range(2))
            if rank.index == 2:
                wire.load_state_dict(older)
            error = error_of(thinwire.DesyncError, lambda: train(model, optimizer, rank.index, [2]))
            assert isinstance(error, thinwire.DesyncError)
            if text in REDUCING:  # nothing tells whose the reduced flags are
                assert (error.field, error.rank) == ("step or settings", None), str(error)
            else:
                assert (error.field, error.rank) == ("step", 0 if rank.index == 2 else 2), str(error)

    return run


def _injected_failure(engine: str) -> Case:
    def run(rank: Rank) -> None:
        """Rank 0 cannot send; it says so at once, and the others give up after their time-out."""
        group = dist.new_group(timeout=datetime.timedelta(seconds=3))
        transport = Faulty(TorchDistTransport(group), fail_at=[1] if rank.index == 0 else [])
        model = wrap(engine, seeded(Net))
        with thinwire.attach(model, compress="topk(density=0.1)", transport=transport):
            loss_of(model, rank.index, 0).backward()
            started_s = time.monotonic()
            error = error_of(thinwire.TransportError, loss_of(model, rank.index, 1).backward)
            assert ("injected fault on rank 0" in str(error)) == (rank.index == 0)
            assert time.monotonic() - started_s < 25

    return run


def missing_partner(rank: Rank) -> None:
    """Rank 0 stays away from a long all-to-all; the others say so after their time-out, and send nothing after it."""
    transport = TorchDistTransport(dist.new_group(timeout=datetime.timedelta(seconds=3)))
    if rank.index == 0:
        return
    messages = torch.zeros((rank.world_size, pairs.FROM_BYTES), dtype=torch.uint8)
    started_s = time.monotonic()
    under_way = [transport.start(AllToAll(messages), Tag()) for _ in range(2)]
    for pending in under_way:
        assert "AllToAll failed on rank" in str(error_of(thinwire.TransportError, pending.wait))
    assert time.monotonic() - started_s < 25


CASES["missing partner"] = missing_partner
for _engine in ENGINES:
    for _text in ("topk(density=0.1)", "int4", *REDUCING):
        CASES[f"out of step: {_text} [{_engine}]"] = _out_of_step(_text, _engine)
    CASES[f"injected failure [{_engine}]"] = _injected_failure(_engine)


def wrong_checkpoints(rank: Rank) -> None:
    """A state of something else is refused with the reason, and changes nothing."""
    model = seeded(Net)
    with thinwire.attach(model, compress="topk(density=0.1)") as wire:
        loss_of(model, rank.index, 0).backward()
        good = wire.state_dict()
        loss_of(model, rank.index, 1).backward()
        tensors = good["tensors"]
        shorter = {**tensors, "first.weight": {"residual": torch.zeros(7)}}
        wrong: dict[str, dict[str, Any]] = {
            "compress": {**good, "compress": "topk(density=0.2)"},
            "world_size": {**good, "world_size": 4},
            "rank": {**good, "rank": rank.index + 1},
            "version": {},
            "missing ['first.weight']": {**good, "tensors": {k: v for k, v in tensors.items() if k != "first.weight"}},
            "unexpected ['extra']": {**good, "tensors": {**tensors, "extra": {}}},
            "missing ['residual']": {**good, "tensors": {**tensors, "first.weight": {}}},
            "has 7 elements, expected 1344": {**good, "tensors": shorter},
            "step": {key: value for key, value in good.items() if key != "step"},
            "tensors": {key: value for key, value in good.items() if key != "tensors"},
        }
        before = digest(wire.state_dict())
        for expected, state in wrong.items():
            error = error_of(thinwire.CheckpointError, partial(wire.load_state_dict, state))
            assert expected in str(error), (expected, str(error))
            assert digest(wire.state_dict()) == before, expected
        wire.load_state_dict(good)
        assert digest(wire.state_dict()["tensors"]) == digest(tensors)


CASES["wrong checkpoints"] = wrong_checkpoints
