"""Cases: policies with local steps, on two real processes, with plain modules and with DDP."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from gloo.support import Cases, Net, Rank, batch, digest, loss_of, seeded, train, wrap

CASES = Cases()
SPECS = [
    "stream",
    "stream(bits=4, slices=3, delay=2)",
    "local(h=3)",
    "post_local(h=2, start=4)",
    "slowmo(h=3)",
    "adacomm(h=4, every=1)",
    "diloco(h=4)",
    "streaming_diloco(h=4, fragments=2)",
    "sparseloco(h=3, compress='ef(decay=0.95) | stk(density=0.2)')",
    "sparta(density=0.1)",
    "layerwise(h=2, stretch=2, layers=3)",
    "sapus(h=2)",
    "momentum_k(h=2)",
]


def gathered(text: str) -> list[str]:
    """What every rank says."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def fixed_loss(model: nn.Module) -> float:
    """On batches of both ranks that nobody trains on."""
    with torch.no_grad():
        batches = [batch(rank, 10_000 + rank) for rank in range(2)]
        return sum(float(nn.functional.cross_entropy(model(x), y)) for x, y in batches)


def memorise(model: nn.Module, optimizer: torch.optim.Optimizer, wire: Any, rank: int, steps: int) -> None:
    """A few batches again and again: random labels can only be learned by heart."""
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step % 3)
        loss.backward()
        wire.report_loss(loss.detach())
        optimizer.step()


def _short_run(spec: str) -> Any:
    def run(rank: Rank, engine: str) -> None:
        model = wrap(engine, seeded(Net))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
        with thinwire.attach(model, optimizer, sync=spec) as wire:
            before = float(loss_of(model, rank.index, 0).detach())
            memorise(model, optimizer, wire, rank.index, 48)
            sync = wire.state_dict()["sync"]
            shared = {"anchor": sync["deltas"]["anchor"], "memory": sync["memory"], "step": sync["step"]}
            if "sapus" not in spec:  # its seconds are the same on all ranks, but are they in two runs?
                shared["numbers"] = sync["numbers"]
            assert len(set(gathered(digest(shared)))) == 1, "ranks do not agree"
            with wire.averaged(exact=True):
                assert len(set(gathered(digest(dict(model.named_parameters()))))) == 1
                after = float(loss_of(model, rank.index, 0).detach())
            assert after < 0.9 * before, (before, after)
            assert wire.stats().wire_bytes > 0
        names = [one.name for one in threading.enumerate() if one.name.startswith("thinwire")]
        assert not names, f"still running after detach: {names}"

    return run


for _spec in SPECS:
    for _engine in ("plain", "ddp"):
        CASES.add(_short_run(_spec), _engine, f"short run of {_spec}")


@CASES.both
def replicas_agree_after_an_average_that_is_waited_for(rank: Rank, engine: str) -> None:
    model = wrap(engine, seeded(Net))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with thinwire.attach(model, optimizer, sync="local(h=4)"):
        train(model, optimizer, rank.index, range(3))
        assert len(set(gathered(digest(dict(model.named_parameters()))))) == 2
        train(model, optimizer, rank.index, range(3, 4))
        assert len(set(gathered(digest(dict(model.named_parameters()))))) == 1


@CASES.both
def gradients_stay_local_and_nothing_is_sent_in_backward(rank: Rank, engine: str) -> None:
    """Also where DDP would send which parameters were used."""
    options = {"find_unused_parameters": True} if engine == "ddp" else {}
    model, twin = wrap(engine, seeded(Net), **options), seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with thinwire.attach(model, optimizer, sync="local(h=1000)") as wire:
        if isinstance(model, DistributedDataParallel):
            assert not model.require_backward_grad_sync
        for step in range(2 + rank.index):  # one rank makes a pass more: whoever sent anything would wait for it
            for one in (model, twin):
                one.zero_grad()
                loss_of(one, rank.index, step).backward()
            for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]
        assert wire.stats().wire_bytes < 100_000
    if isinstance(model, DistributedDataParallel):
        assert model.require_backward_grad_sync, "detach gives DDP back as it was"


@CASES.both
def a_nan_on_one_rank_skips_its_step_alone(rank: Rank, engine: str) -> list[int]:
    model = wrap(engine, seeded(Net))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with thinwire.attach(model, optimizer, sync="stream(bits=4)") as wire:
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(model, rank.index, step)
            (loss * float("nan") if (step, rank.index) == (3, 1) else loss).backward()
            optimizer.step()
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        state = wire.state_dict()["sync"]
        assert len(set(gathered(digest(state["deltas"]["anchor"])))) == 1
        assert (state["step"], state["taken"]) == (8, 8 - rank.index)
        return [state["step"], state["taken"]]


@CASES.both
def a_real_scaler_that_skips_on_one_rank(rank: Rank, engine: str) -> None:
    model = wrap(engine, seeded(Net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with thinwire.attach(model, optimizer, sync="local(h=2)", scaler=scaler) as wire:
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, rank.index, step) * (float("inf") if (step, rank.index) == (2, 0) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert wire.state_dict()["sync"]["taken"] == 6 - (rank.index == 0)
        assert len(set(gathered(digest(dict(model.named_parameters()))))) == 1
        assert scaler.get_scale() == (4.0 if rank.index == 0 else 8.0)


class Normed(nn.Module):
    """BatchNorm, a frozen layer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.frozen = nn.Linear(24, 56), nn.BatchNorm1d(56), nn.Linear(56, 56)
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(56, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.drop(torch.relu(self.frozen(self.norm(self.first(x))))))
        return result


@CASES.both
def statistics_frozen_layers_and_dropout(rank: Rank, engine: str) -> None:
    model = wrap(engine, seeded(Normed))
    frozen = digest({n: p for n, p in model.named_parameters() if not p.requires_grad})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with thinwire.attach(model, optimizer, sync="local(h=4)") as wire:
        train(model, optimizer, rank.index, range(7))
        buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
        assert len(set(gathered(digest(buffers)))) == 2
        train(model, optimizer, rank.index, range(7, 8))
        assert len(set(gathered(digest({n: b for n, b in model.named_buffers() if b.is_floating_point()})))) == 1
        assert frozen == digest({n: p for n, p in model.named_parameters() if not p.requires_grad})
        assert "norm.running_mean" in wire.state_dict()["sync"]["deltas"]["anchor"]


@CASES.both
def accumulation_schedulers_and_evaluation_in_the_middle(rank: Rank, engine: str) -> None:
    model = wrap(engine, seeded(Net))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    with thinwire.attach(model, optimizer, sync="stream(bits=4)") as wire:
        for step in range(6):
            with wire.no_sync():
                loss_of(model, rank.index, 2 * step).backward()
            loss_of(model, rank.index, 2 * step + 1).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if step % 2 and rank.index == 0:  # rank 0 alone: nothing may be sent
                model.eval()
                with wire.averaged():
                    fixed_loss(getattr(model, "module", model))
                model.train()
        rates = {group["lr"] for group in optimizer.param_groups}
        assert rates == {scheduler.get_last_lr()[0]}
        with wire.averaged():
            assert len(set(gathered(digest(dict(model.named_parameters()))))) == 1


@CASES.plain
def a_compiled_module(rank: Rank, engine: str) -> None:
    model = seeded(Net)
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with thinwire.attach(compiled, optimizer, sync="stream(bits=4)") as wire:
        train(compiled, optimizer, rank.index, range(4))
        assert set(wire.state_dict()["sync"]["deltas"]["anchor"]) == {name for name, _ in model.named_parameters()}
        with wire.averaged():
            assert len(set(gathered(digest(dict(model.named_parameters()))))) == 1
