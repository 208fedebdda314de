"""Cases: models and loops that plain DDP runs, and what a loop may do to a model after ``attach``. Two ranks."""

from __future__ import annotations

import copy
import io
import os
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.distributed_c10d import _world
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import thinwire
from gloo.support import Cases, Net, Rank, close, digest, error_of, loss_of, mean_gradients, seeded, sgd, train, wrap

CASES = Cases()
SPARSE = "topk(density=0.1)"


def bare(model: nn.Module) -> Any:
    return model.module if isinstance(model, DistributedDataParallel) else model


@CASES.both
def a_gan_keeps_discarded_gradients_out_of_the_residual(rank: Rank, engine: str) -> None:
    """The generator's backward fills the discriminator's gradients, which the loop zeroes before its optimizer steps."""
    generator, discriminator = wrap(engine, nn.Linear(8, 24)), wrap(engine, seeded(Net))
    g_step, d_step = sgd(generator), sgd(discriminator)
    with (
        thinwire.attach(generator, g_step, compress="dense"),
        thinwire.attach(discriminator, d_step, compress="topk(density=0.1)") as wire,
    ):
        for step in range(3):
            d_step.zero_grad()
            loss_of(discriminator, rank.index, step).backward()
            d_step.step()
            after_step = wire.state_dict()["tensors"]
            g_step.zero_grad()
            discriminator(generator(torch.randn(4, 8))).square().mean().mul(1e3).backward()
            g_step.step()
            d_step.zero_grad(set_to_none=step % 2 == 0)
            discriminator(torch.randn(4, 24))
            assert digest(wire.state_dict()["tensors"]) == digest(after_step), step


class Muonlike(torch.optim.Optimizer):
    """Takes a missing gradient for zeros, and moves weights by its momentum all the same."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                buffer = self.state[parameter].setdefault("momentum", torch.ones_like(parameter))
                buffer.mul_(0.9).add_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
                parameter.data.add_(buffer, alpha=-group["lr"])


@CASES.both
def a_skipped_step_is_skipped_by_all_optimizers(rank: Rank, engine: str) -> str:
    model = wrap(engine, seeded(Net))
    first, *rest = model.parameters()
    optimizers = [Muonlike([first]), torch.optim.AdamW(rest, lr=0.01)]
    with thinwire.attach(model, optimizers, compress=SPARSE) as wire:
        for step in range(4):
            before = digest({"model": model.state_dict(), "moments": [o.state_dict()["state"] for o in optimizers]})
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(model, rank.index, step)
            (loss * float("nan") if (step, rank.index) == (2, 1) else loss).backward()
            for optimizer in optimizers:
                optimizer.step()
            after = digest({"model": model.state_dict(), "moments": [o.state_dict()["state"] for o in optimizers]})
            assert (after == before) == (step == 2), step
        assert wire.stats().skipped_steps == 1
        assert [len(group["params"]) for o in optimizers for group in o.param_groups] == [1, len(rest)]
    return digest(dict(model.named_parameters()))


@CASES.plain
def parameters_added_or_replaced_are_refused(rank: Rank, engine: str) -> None:
    for change in ("added", "replaced"):
        net = seeded(Net)
        assert isinstance(net, Net)
        with thinwire.attach(net, compress="int4"):
            loss_of(net, rank.index, 0).backward()
            if change == "added":
                net.register_parameter("extra", nn.Parameter(torch.zeros(3)))
            else:
                net.last.weight = nn.Parameter(net.last.weight.detach().clone())
            message = str(error_of(thinwire.ConfigError, loss_of(net, rank.index, 1).backward))
            assert ("extra was missing" if change == "added" else "last.weight was replaced") in message
            assert "attach() again" in message


@CASES.plain
def an_optimizer_inside_backward_is_refused(rank: Rank, engine: str) -> None:
    def step_in_backward(net: nn.Module) -> None:
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: p.data.add_(p.grad, alpha=-0.1))

    early, late = seeded(Net), seeded(Net)
    step_in_backward(early)
    assert "another post-accumulate-grad hook" in str(error_of(thinwire.ConfigError, lambda: thinwire.attach(early)))
    with thinwire.attach(late):
        step_in_backward(late)
        error = error_of(thinwire.ConfigError, loss_of(late, rank.index, 0).backward)
        assert "after backward" in str(error)


class Checkpointed(nn.Module):
    """Every block is computed once more in backward, by a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: Tensor, reentrant: bool) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant) if reentrant else block(x)
        return x


@CASES.plain
def reentrant_checkpointing_is_one_exchange(rank: Rank, engine: str) -> None:
    model = seeded(Checkpointed)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(rank.index)).requires_grad_()
    with thinwire.attach(model, compress="dense") as wire:
        model(x, False).square().mean().backward()
        plain_bytes, expected = wire.stats().wire_bytes, [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        model.zero_grad()
        at_attach = wire._link.sent_bytes
        model(x, True).square().mean().backward()
        assert wire.stats().steps == 2
        assert wire.stats().wire_bytes - plain_bytes == plain_bytes - at_attach
        for got, gradient in zip(model.parameters(), expected, strict=True):
            close(got.grad, gradient)


@CASES.plain
def accumulation_as_nanogpt_does_it(rank: Rank, engine: str) -> None:
    """A loop that sets ``require_backward_grad_sync`` on whatever model it has."""
    model = seeded(Net)
    with thinwire.attach(model, compress="dense") as wire:
        for micro_step in range(3):
            model.require_backward_grad_sync = micro_step == 2  # type: ignore[assignment]
            loss_of(model, rank.index, micro_step).backward()
        assert wire.stats().steps == 1
    parts = [mean_gradients(seeded(Net), rank.world_size, step) for step in range(3)]
    for name, parameter in model.named_parameters():
        close(parameter.grad, parts[0][name] + parts[1][name] + parts[2][name])


@CASES.both
def exact_methods_are_exact_in_the_parameters_own_precision(rank: Rank, engine: str) -> None:
    model = wrap(engine, seeded(Net).double())
    x = torch.randn(8, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(rank.index))
    with thinwire.attach(model, compress="dense"):
        model(x).square().mean().backward()
    alone = seeded(Net).double()
    alone(x).square().mean().backward()
    for got, own in zip(model.parameters(), alone.parameters(), strict=True):
        assert own.grad is not None
        dist.all_reduce(own.grad)
        assert got.grad is not None
        assert got.grad.dtype is torch.float64
        torch.testing.assert_close(got.grad, own.grad / rank.world_size, rtol=1e-14, atol=1e-16)


@CASES.plain
def gradients_keep_channels_last(rank: Rank, engine: str) -> None:
    model = nn.Conv2d(16, 24, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 16, 6, 6).to(memory_format=torch.channels_last)
    for compress in ("dense", "int4"):
        model.zero_grad()
        with thinwire.attach(model, compress=compress):
            model(x).square().mean().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.is_contiguous(memory_format=torch.channels_last), compress


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16, sparse=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.table(x))
        return result


@CASES.both
def sparse_embeddings_train(rank: Rank, engine: str) -> str:
    """SparseAdam gets sparse gradients back; their values are the mean over the ranks."""
    model = wrap(engine, seeded(Words))
    words = bare(model)
    optimizers = [torch.optim.SparseAdam([words.table.weight]), torch.optim.SGD(words.head.parameters(), lr=0.1)]
    with thinwire.attach(model, optimizers, compress="dense"):
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            rows = torch.tensor([step, 10 + rank.index, 10 + rank.index])
            local = copy.deepcopy(words)
            local(rows).square().mean().backward()
            model(rows).square().mean().backward()
            mine = local.table.weight.grad.to_dense()
            dist.all_reduce(mine)
            got = words.table.weight.grad
            assert got.is_sparse
            assert set(got.coalesce().indices()[0].tolist()) == {step, 10, 11}
            close(got.to_dense(), mine / rank.world_size)
            for optimizer in optimizers:
                optimizer.step()
    return digest(dict(model.named_parameters()))


@CASES.both
def copies_are_plain_modules(rank: Rank, engine: str) -> None:
    """EMA models, deep copies and pickles of an attached module work, and are not attached."""
    net = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.Linear(32, 3))
    model = wrap(engine, net)
    with thinwire.attach(model, sgd(model)) as wire:
        loss_of(model, rank.index, 0).backward()
        averaged = AveragedModel(bare(model))
        averaged.update_parameters(bare(model))
        again = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(bare(model), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        steps = wire.stats().steps
        for one in (again, averaged, loaded) if engine == "plain" else (averaged, loaded):
            one.zero_grad()
            loss_of(one, rank.index, 1).backward()
        assert wire.stats().steps == steps, "a copy took part in the exchange"


class Ignoring(Net):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.own(x)


@CASES.ddp
def parameters_that_ddp_ignores_stay_local(rank: Rank, engine: str) -> None:
    net = seeded(Ignoring)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["own.weight", "own.bias"])
    model = DistributedDataParallel(net)
    with thinwire.attach(model, compress="int4") as wire:
        loss_of(model, rank.index, 0).backward()
        assert "own.weight" not in wire.state_dict()["tensors"]
    alone = seeded(Ignoring)
    loss_of(alone, rank.index, 0).backward()
    close(net.own.weight.grad, alone.own.weight.grad)  # type: ignore[union-attr]


@CASES.ddp
def ranks_with_fewer_batches_join(rank: Rank, engine: str) -> str:
    """``Join`` with uneven inputs, also with ZeroRedundancyOptimizer; what joined ranks give counts as zeros."""
    model = DistributedDataParallel(seeded(Net))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with thinwire.attach(model, optimizer, compress="dense") as wire, Join([model, optimizer]):
        for step in range(3 + 2 * rank.index):
            optimizer.zero_grad()
            loss_of(model, rank.index, step).backward()
            optimizer.step()
    assert wire.stats().steps == 5
    return digest(dict(model.named_parameters()))


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn, self.head = nn.Parameter(torch.randn(24, 32, dtype=torch.complex64)), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head((x.to(torch.complex64) @ self.turn).abs())
        return result


@CASES.both
def complex_parameters_are_averaged(rank: Rank, engine: str) -> str:
    expected = mean_gradients(seeded(Rotated), rank.world_size, 0)
    for compress in ("dense", "int8"):
        model = wrap(engine, seeded(Rotated))
        with thinwire.attach(model, compress=compress):
            loss_of(model, rank.index, 0).backward()
        gradient = bare(model).turn.grad
        assert gradient.dtype is torch.complex64
        error = (gradient - expected["turn"]).abs().max() / expected["turn"].abs().max()
        assert float(error) < (1e-6 if compress == "dense" else 0.02), compress
    return digest({"gradient": torch.view_as_real(gradient)})


@CASES.plain
def lazy_modules_are_told_when_to_attach(rank: Rank, engine: str) -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    error = error_of(thinwire.ConfigError, lambda: thinwire.attach(model))
    assert "run one forward pass, then attach" in str(error)
    model(torch.randn(2, 24))
    thinwire.attach(model).detach()


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, raises: bool) -> Tensor:
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.raises:
            raise KeyError("a bug in somebody's backward")
        return gradients[0], None


@CASES.plain
def an_exception_in_one_ranks_backward_leaves_the_wire_usable(rank: Rank, engine: str) -> str:
    """The rank goes on with its next batch: its step is aborted on all ranks, and the next one is averaged as ever."""
    net = seeded(Net)
    assert isinstance(net, Net)
    optimizer = sgd(net)
    with thinwire.attach(net, optimizer, compress=SPARSE) as wire:
        train(net, optimizer, rank.index, range(2))
        optimizer.zero_grad()
        hidden = torch.relu(net.first(torch.randn(4, 24)))
        loss = net.last(torch.tanh(net.second(Raising.apply(hidden, rank.index == 1)))).sum()  # type: ignore[no-untyped-call]
        if rank.index == 1:
            error_of(KeyError, loss.backward)
        else:
            loss.backward()
            optimizer.step()
        train(net, optimizer, rank.index, range(3, 5))
        assert (wire.stats().steps, wire.stats().skipped_steps) == (5, 1)
    return digest(dict(net.named_parameters()))


@CASES.plain
def attaching_again_and_again_leaves_nothing(rank: Rank, engine: str) -> None:
    """Descriptors, threads and process groups, after 200 cycles of the smallest model."""

    def cycle() -> None:
        with thinwire.attach(model, compress="int4"):
            model(torch.ones(1, 2)).sum().backward()

    def held() -> tuple[int, int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(_world.pg_map)

    model = nn.Linear(2, 1)
    cycle()
    before = held()
    for _ in range(200):
        cycle()
    after = held()
    assert after[1:] == before[1:], (before, after)
    assert after[0] <= before[0] + 4, (before, after)  # a closed connection may wait for its peer's end
