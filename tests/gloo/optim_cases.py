"""Cases: what a wire says has arrived, and the optimizers that ask it, on two real ranks.

A case returns what must be the same on all ranks; what it must be is asserted inside.
"""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor, nn

import thinwire
from gloo.support import Cases, Net, Rank, digest, loss_of, seeded, train, wrap
from thinwire.engine.ages import wire_of
from thinwire.optim import SGD, AdamW

CASES = Cases()
SPARSE = "topk(density=0.1)"


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    states = {str(index): state for index, state in optimizer.state_dict()["state"].items()}
    return {"model": dict(model.named_parameters()), "optimizer": states}


def ages_by_name(model: nn.Module, wire: thinwire.Attached) -> dict[str, Tensor]:
    found = {name: wire.received(parameter) for name, parameter in model.named_parameters()}
    return {name: received.ages.clone() for name, received in found.items() if received is not None}


@CASES.both
def ages_are_steps_since_the_last_receipt(rank: Rank, engine: str) -> str:
    model = wrap(engine, seeded(Net))
    optimizer = AdamW(model.parameters(), lr=0.01)
    last: dict[str, Tensor] = {}
    with thinwire.attach(model, optimizer, compress=SPARSE) as wire:
        for step in range(1, 9):
            train(model, optimizer, rank.index, [step])
            ages = ages_by_name(model, wire)
            assert len(ages) == 2, "the two large matrices and nothing else travel sparse"
            for name, parameter in model.named_parameters():
                if name in ages:
                    assert parameter.grad is not None
                    came = parameter.grad != 0
                    before = last.get(name, torch.zeros_like(parameter, dtype=torch.long))
                    assert torch.equal(ages[name].long(), torch.where(came, step - before, 0)), (name, step)
                    last[name] = torch.where(came, step, before)
    assert max(int(one.max()) for one in ages.values()) > 3, "everything was received in every step: nothing is tested"
    return digest({**ages, **everything(model, optimizer)})


@CASES.both
def aged_steps_are_not_stock_steps_and_both_train(rank: Rank, engine: str) -> str:
    ends = {}
    for name, make in (("ours", AdamW), ("stock", torch.optim.AdamW), ("sgd", SGD)):
        model = wrap(engine, seeded(Net))
        optimizer = make(model.parameters(), lr=0.003)
        before = loss_of(model, rank.index, 0).item()
        with thinwire.attach(model, optimizer, compress=SPARSE):
            train(model, optimizer, rank.index, [0] * 12)
        assert loss_of(model, rank.index, 0).item() < before, name
        ends[name] = digest(everything(model, optimizer))
    assert len(set(ends.values())) == 3
    return digest(ends)


@CASES.both
def all_dense_is_torchs_bit_for_bit(rank: Rank, engine: str) -> str:
    ends = []
    for make in (AdamW, torch.optim.AdamW):
        model = wrap(engine, seeded(Net))
        optimizer = make(model.parameters(), lr=0.01)
        with thinwire.attach(model, optimizer, compress="int4"):
            train(model, optimizer, rank.index, range(5))
        ends.append(digest(everything(model, optimizer)))
    assert ends[0] == ends[1]
    return ends[0]


@CASES.both
def a_step_with_a_nan_on_one_rank_changes_nothing(rank: Rank, engine: str) -> str:
    model = wrap(engine, seeded(Net))
    optimizer = AdamW(model.parameters(), lr=0.01)
    with thinwire.attach(model, optimizer, compress=SPARSE) as wire:
        train(model, optimizer, rank.index, range(3))
        before = digest({**everything(model, optimizer), **wire.state_dict()["ages"]})
        optimizer.zero_grad()
        loss = loss_of(model, rank.index, 3)
        (loss * float("nan") if rank.index == 1 else loss).backward()
        assert not any(bool(ages.any()) for ages in ages_by_name(model, wire).values())
        optimizer.step()
        assert digest({**everything(model, optimizer), **wire.state_dict()["ages"]}) == before
        train(model, optimizer, rank.index, [4])
    return digest(everything(model, optimizer))


@CASES.both
def accumulated_passes_are_one_step(rank: Rank, engine: str) -> str:
    model = wrap(engine, seeded(Net))
    optimizer = AdamW(model.parameters(), lr=0.01)
    with thinwire.attach(model, optimizer, compress=SPARSE) as wire:
        train(model, optimizer, rank.index, range(2))
        waiting = {name: int(since.max()) for name, since in wire.state_dict()["ages"].items()}
        optimizer.zero_grad()
        with wire.no_sync():
            for step in range(2, 5):
                loss_of(model, rank.index, step).backward()
        assert waiting == {name: int(since.max()) for name, since in wire.state_dict()["ages"].items()}
        loss_of(model, rank.index, 5).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        now = {name: int(since.max()) for name, since in wire.state_dict()["ages"].items()}
        assert now == {name: age + 1 for name, age in waiting.items()}
    return digest(everything(model, optimizer))


@CASES.both
def saved_and_loaded_it_goes_on_bit_for_bit(rank: Rank, engine: str) -> str:
    model = wrap(engine, seeded(Net))
    optimizer = AdamW(model.parameters(), lr=0.01)
    with thinwire.attach(model, optimizer, compress=SPARSE) as wire:
        train(model, optimizer, rank.index, range(4))
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        moments, ages = copy.deepcopy(optimizer.state_dict()), wire.state_dict()
        train(model, optimizer, rank.index, range(4, 8))
        uninterrupted = digest(everything(model, optimizer))
    again = wrap(engine, seeded(Net, seed=9))
    resumed = AdamW(again.parameters(), lr=0.01)
    with thinwire.attach(again, resumed, compress=SPARSE) as wire:
        again.load_state_dict(saved)
        resumed.load_state_dict(moments)
        wire.load_state_dict(ages)
        train(again, resumed, rank.index, range(4, 8))
    assert digest(everything(again, resumed)) == uninterrupted
    return uninterrupted


@CASES.both
def after_detach_nobody_is_asked(rank: Rank, engine: str) -> str:
    model = wrap(engine, seeded(Net))
    parameter = next(model.parameters())
    with thinwire.attach(model, compress=SPARSE):
        assert wire_of(parameter) is not None
    assert wire_of(parameter) is None
    return "detached"


class Branches(nn.Module):
    """Uses one of two matrices, as told."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        result: Tensor = (self.left if left else self.right)(x)
        return result


@CASES.both
def for_what_no_rank_uses_no_time_passes(rank: Rank, engine: str) -> str:
    model = wrap(engine, seeded(Branches), **({"find_unused_parameters": True} if engine == "ddp" else {}))
    optimizer = AdamW(model.parameters(), lr=0.01)
    with thinwire.attach(model, optimizer, compress=SPARSE) as wire:
        for step, left in enumerate((True, True, False, False, False)):
            optimizer.zero_grad()
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank.index))
            model(x, left).square().mean().backward()
            optimizer.step()
        waiting = wire.state_dict()["ages"]
        assert waiting["left.weight"].max() <= 2
        assert waiting["right.weight"].max() == 3
    return digest(everything(model, optimizer))


@CASES.plain
def a_compiled_training_step(rank: Rank, engine: str) -> str:
    ends = []
    for compiled in (False, True):
        model = seeded(Net)
        optimizer = AdamW(model.parameters(), lr=0.01)
        forward = torch.compile(model, backend="eager") if compiled else model
        with thinwire.attach(model, optimizer, compress=SPARSE):
            step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
            for index in range(4):
                optimizer.zero_grad()
                loss_of(forward, rank.index, index).backward()  # type: ignore[arg-type]
                step()
        ends.append(digest(everything(model, optimizer)))
    assert ends[0] == ends[1]
    return ends[0]


@CASES.both
def the_update_score_asks_the_optimizer(rank: Rank, engine: str) -> str:
    """The first step has no second moment yet and selects as plain top-k does; later ones otherwise, on all ranks alike."""
    ends = []
    for spec in (SPARSE, "topk(density=0.1, score='update')"):
        model = wrap(engine, seeded(Net))
        optimizer = AdamW(model.parameters(), lr=0.01)
        digests = []
        with thinwire.attach(model, optimizer, compress=spec):
            for step in range(4):
                train(model, optimizer, rank.index, [step])
                digests.append(digest(dict(model.named_parameters())))
        ends.append(digests)
    assert ends[0][0] == ends[1][0]
    assert ends[0][3] != ends[1][3]
    return ends[1][3]


@CASES.plain
def a_stock_optimizer_with_a_sparsifier_is_warned_about(rank: Rank, engine: str) -> list[int]:
    """Once, on rank 0, with the name of the drop-in; not for our own, nor for what sends everything."""
    counts = []
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    for make, compress in ((adamw, SPARSE), (sgd, SPARSE), (AdamW, SPARSE), (adamw, "int4")):
        model = seeded(Net)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            thinwire.attach(model, make(model.parameters(), lr=0.01), compress=compress).detach()
        texts = [str(one.message) for one in caught if "how old the updates are" in str(one.message)]
        assert all(f"thinwire.optim.{make.__name__}" in text for text in texts)
        counts.append(len(texts))
    assert counts == ([1, 1, 0, 0] if rank.index == 0 else [0, 0, 0, 0])
    return []
