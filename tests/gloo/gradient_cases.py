"""Cases: what gradients are after a backward pass, on a plain module and on DDP. Two ranks.

A case returns what must be the same on all ranks; what it must be is asserted inside.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from gloo.support import (
    Cases,
    Net,
    Rank,
    batch,
    close,
    digest,
    error_of,
    loss_of,
    mean_gradients,
    seeded,
    sgd,
    train,
    wrap,
)

CASES = Cases()


@CASES.both
def dense_equals_stock_ddp(rank: Rank, engine: str) -> str:
    stock = DistributedDataParallel(seeded(Net))
    train(stock, sgd(stock), rank.index, range(4))
    model = wrap(engine, seeded(Net))
    optimizer = sgd(model)
    with thinwire.attach(model, optimizer, compress="dense") as wire:
        train(model, optimizer, rank.index, range(4))
        assert wire.stats().steps == 4
    for (name, got), expected in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6), name
    return digest(dict(model.named_parameters()))


@CASES.both
def gradients_are_averaged_after_backward(rank: Rank, engine: str) -> str:
    """With every fusion setting; so clipping and anything else that reads gradients sees the averages."""
    model = wrap(engine, seeded(Net))
    expected = mean_gradients(seeded(Net), rank.world_size, 0)
    for fuse in ("none", "auto", "4KiB"):
        with thinwire.attach(model, compress="dense", fuse=fuse):
            model.zero_grad()
            loss_of(model, rank.index, 0).backward()
            for gradient, right in zip((p.grad for p in model.parameters()), expected.values(), strict=True):
                assert gradient is not None
                close(gradient, right)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    close(norm, torch.stack([g.norm() for g in expected.values()]).norm())
    return digest({name: p.grad for name, p in model.named_parameters()})


@CASES.both
def accumulation_under_no_sync_averages_the_sum(rank: Rank, engine: str) -> str:
    model = wrap(engine, seeded(Net))
    with thinwire.attach(model, compress="dense") as wire:
        with wire.no_sync():
            loss_of(model, rank.index, 0).backward()
            loss_of(model, rank.index, 1).backward()
        assert wire.stats().steps == 0
        loss_of(model, rank.index, 2).backward()
        assert wire.stats().steps == 1
    parts = [mean_gradients(seeded(Net), rank.world_size, step) for step in range(3)]
    for (name, parameter), key in zip(model.named_parameters(), parts[0], strict=True):
        assert parameter.grad is not None, name
        close(parameter.grad, parts[0][key] + parts[1][key] + parts[2][key])
    return digest({name: p.grad for name, p in model.named_parameters()})


class Branches(nn.Module):
    """Parts that a forward pass may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor, use: str) -> Tensor:
        total = sum((getattr(self, name)(x) for name in use), torch.zeros(()))
        assert isinstance(total, Tensor)
        return total.sum()


def _input(rank: int) -> Tensor:
    return torch.full((1, 32), float(rank + 1))


@CASES.both
def parameters_used_on_some_ranks_or_none(rank: Rank, engine: str) -> str:
    model = wrap(engine, seeded(Branches), **({"find_unused_parameters": True} if engine == "ddp" else {}))
    branches = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(branches, Branches)
    with thinwire.attach(model, compress="dense", fuse="none"):
        model(_input(rank.index), "ab" if rank.index == 1 else "a").backward()
    a, b = branches.a.weight.grad, branches.b.weight.grad
    assert a is not None
    assert b is not None
    close(a, torch.full((32, 32), 1.5))  # ranks 0 and 1 have gradients 1 and 2
    close(b, torch.full((32, 32), 1.0))  # only rank 1, with gradient 2
    assert branches.c.weight.grad is None
    return digest({"a": a, "b": b})


@CASES.both
def used_only_before_the_last_micro_batch(rank: Rank, engine: str) -> str:
    """What no_sync has accumulated is averaged, also where the last pass does not touch it."""
    model = wrap(engine, seeded(Branches), **({"find_unused_parameters": True} if engine == "ddp" else {}))
    branches = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(branches, Branches)
    with thinwire.attach(model, compress="dense", fuse="none") as wire:
        with wire.no_sync():
            model(_input(rank.index), "ab" if rank.index == 0 else "abc").backward()
        model(_input(rank.index), "a").backward()
    a, b, c = (getattr(branches, name).weight.grad for name in "abc")
    close(a, torch.full((32, 32), 3.0))
    close(b, torch.full((32, 32), 1.5))
    close(c, torch.full((32, 32), 1.0))
    return digest({"a": a, "b": b, "c": c})


@CASES.both
def residuals_of_unused_parameters_wait(rank: Rank, engine: str) -> None:
    """A mean that nobody applies must not be paid for out of the residual."""
    model = wrap(engine, seeded(Branches), **({"find_unused_parameters": True} if engine == "ddp" else {}))
    with thinwire.attach(model, compress="topk(density=0.1)") as wire:
        model(torch.randn(1, 32), "abc").backward()
        before = wire.state_dict()["tensors"]
        model.zero_grad()
        model(torch.randn(1, 32), "ac").backward()
        after = wire.state_dict()["tensors"]
    assert torch.equal(before["b.weight"]["residual"], after["b.weight"]["residual"])
    assert not torch.equal(before["a.weight"]["residual"], after["a.weight"]["residual"])
    assert float(before["b.weight"]["residual"].abs().max()) > 0


@CASES.both
def frozen_parameters_stay_out(rank: Rank, engine: str) -> str:
    net = seeded(Net)
    assert isinstance(net, Net)
    net.first.weight.requires_grad_(False)
    model = wrap(engine, net)
    optimizer = sgd(model)
    with thinwire.attach(model, optimizer, compress="int8") as wire:
        train(model, optimizer, rank.index, range(2))
        assert "first.weight" not in wire.state_dict()["tensors"]
        assert net.first.weight.grad is None
        assert torch.equal(net.first.weight, seeded(Net).first.weight)  # type: ignore[union-attr, arg-type]
    return digest(dict(model.named_parameters()))


@CASES.plain
def unfreezing_is_refused(rank: Rank, engine: str) -> None:
    net = seeded(Net)
    assert isinstance(net, Net)
    net.first.weight.requires_grad_(False)
    with thinwire.attach(net, compress="int4"):
        net.first.weight.requires_grad_(True)
        message = str(error_of(thinwire.ConfigError, loss_of(net, rank.index, 0).backward))
        assert "first.weight was frozen" in message
        assert "attach() again" in message


@CASES.both
def bf16_parameters(rank: Rank, engine: str) -> str:
    model = wrap(engine, seeded(Net).to(torch.bfloat16))
    optimizer = sgd(model)
    with thinwire.attach(model, optimizer, compress="int8"):
        for step in range(3):
            x, labels = batch(rank.index, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(torch.bfloat16)).float(), labels).backward()
            optimizer.step()
    assert all(p.dtype == torch.bfloat16 and bool(p.isfinite().all()) for p in model.parameters())
    return digest(dict(model.named_parameters()))


class Odd(nn.Module):
    """A scalar, an empty parameter, and a convolution in channels_last order."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.conv = nn.Conv2d(16, 24, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = (self.conv(x) * self.scale).square().mean() + self.empty.sum()
        return result


@CASES.both
def scalar_empty_and_non_contiguous_parameters(rank: Rank, engine: str) -> str:
    def loss(model: nn.Module, index: int) -> Tensor:
        x = torch.randn(2, 16, 6, 6, generator=torch.Generator().manual_seed(index))
        result: Tensor = model(x.to(memory_format=torch.channels_last))
        return result

    alone = seeded(Odd)
    torch.stack([loss(alone, index) for index in range(rank.world_size)]).mean().backward()
    model = wrap(engine, seeded(Odd))
    for text in ("dense", "topk(density=1.0)"):
        model.zero_grad()
        with thinwire.attach(model, compress=text, fuse="none"):
            loss(model, rank.index).backward()
        for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert got.grad is not None
            assert expected.grad is not None
            close(got.grad, expected.grad)
    return digest({name: p.grad for name, p in model.named_parameters()})
