"""Cases: steps that do not count, and the beginning and end of an attachment. Two ranks.

A case returns what must be the same on all ranks; what it must be is asserted inside.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from gloo.support import (
    ENGINES,
    Cases,
    EngineCase,
    Net,
    Rank,
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


def _poisoned_step(model: nn.Module, rank: Rank, step: int, value: float) -> Tensor:
    """The loss of rank 1 is multiplied by something bad."""
    loss = loss_of(model, rank.index, step)
    return loss * value if rank.index == 1 else loss


@CASES.both
def nan_on_one_rank_skips_the_step_on_all(rank: Rank, engine: str) -> str:
    model = wrap(engine, seeded(Net))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with thinwire.attach(model, optimizer, compress="topk(density=0.1)") as wire:
        train(model, optimizer, rank.index, range(2))
        before = _everything(model, optimizer, wire)
        for bad in (float("nan"), float("inf")):
            optimizer.zero_grad()
            _poisoned_step(model, rank, 2, bad).backward()
            assert any(bool(p.grad.isnan().any()) for p in model.parameters() if p.grad is not None)
            optimizer.step()
            assert _everything(model, optimizer, wire) == before
        assert wire.stats().skipped_steps == 2
        assert wire.stats().steps == 4
        train(model, optimizer, rank.index, range(3, 5))
        assert _everything(model, optimizer, wire) != before
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    return digest(dict(model.named_parameters()))


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer, wire: thinwire.Attached) -> str:
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    return digest({**parts, "wire": wire.state_dict()["tensors"]})


def _amp(dtype: torch.dtype) -> EngineCase:
    def amp_with_an_injected_inf(rank: Rank, engine: str) -> list[Any]:
        model = wrap(engine, seeded(Net))
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        with thinwire.attach(model, optimizer, compress="topk(density=0.1)", scaler=scaler) as wire:
            scales = []
            for step in range(6):
                optimizer.zero_grad()
                before = _everything(model, optimizer, wire)
                with torch.autocast("cpu", dtype=dtype):
                    loss = _poisoned_step(model, rank, step, float("inf") if step == 3 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
                assert (_everything(model, optimizer, wire) == before) == (step == 3), step
            assert wire.stats().skipped_steps == 1
            # Two good steps double the scale, the bad one halves it.
            assert scales == [1024.0, 2048.0, 2048.0, 1024.0, 1024.0, 2048.0]
        return [*scales, digest(dict(model.named_parameters()))]

    return amp_with_an_injected_inf


for _dtype in (torch.float16, torch.bfloat16):
    for _engine in ENGINES:
        CASES.add(_amp(_dtype), _engine, f"amp_with_an_injected_inf: {_dtype}")


@CASES.both
def residuals_are_kept_unscaled(rank: Rank, engine: str) -> None:
    """The same gradients under two loss scales leave the same residuals, up to the rounding of a power of two."""
    residuals = []
    for scale in (1.0, 4096.0):
        model = wrap(engine, seeded(Net))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with thinwire.attach(model, compress="topk(density=0.1)", scaler=scaler) as wire:
            scaler.scale(loss_of(model, rank.index, 0)).backward()
            residuals.append(wire.state_dict()["tensors"])
    for name, state in residuals[0].items():
        for key, value in state.items():
            close(residuals[1][name][key], value)


@CASES.both
def detach_restores_and_reattach_works(rank: Rank, engine: str) -> str:
    model = wrap(engine, seeded(Net))
    optimizer = sgd(model)
    wire = thinwire.attach(model, optimizer, compress="topk(density=0.01)")
    loss_of(model, rank.index, 0).backward()
    wire.detach()
    wire.detach()  # harmless
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("thinwire")]
    assert not optimizer._optimizer_step_pre_hooks
    model.zero_grad()
    loss_of(model, rank.index, 0).backward()
    averaged = mean_gradients(seeded(Net), rank.world_size, 0)
    alone = seeded(Net)
    loss_of(alone, rank.index, 0).backward()
    for parameter, mine, mean in zip(model.parameters(), alone.parameters(), averaged.values(), strict=True):
        assert parameter.grad is not None
        assert mine.grad is not None
        close(parameter.grad, mean if engine == "ddp" else mine.grad)
    with thinwire.attach(model, optimizer, compress="dense"):
        model.zero_grad()
        loss_of(model, rank.index, 0).backward()
        for parameter, mean in zip(model.parameters(), averaged.values(), strict=True):
            assert parameter.grad is not None
            close(parameter.grad, mean)
    return digest({name: p.grad for name, p in model.named_parameters()})


@CASES.both
def an_error_inside_the_with_block_detaches(rank: Rank, engine: str) -> None:
    model = wrap(engine, seeded(Net))
    try:
        with thinwire.attach(model, compress="int4"):
            raise KeyError("user's own")
    except KeyError:
        pass
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("thinwire")]
    with thinwire.attach(model, compress="int4"):
        loss_of(model, rank.index, 0).backward()


@CASES.both
def a_second_attach_is_refused(rank: Rank, engine: str) -> None:
    model = wrap(engine, seeded(Net))
    with thinwire.attach(model, compress="int4"):
        message = str(error_of(thinwire.ConfigError, lambda: thinwire.attach(model, compress="int4")))
        assert "detach() that first" in message
        loss_of(model, rank.index, 0).backward()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("thinwire")]


@CASES.both
def stats_count_what_is_sent(rank: Rank, engine: str) -> list[int]:
    model = wrap(engine, seeded(Net))
    elems = sum(p.numel() for p in model.parameters())
    with thinwire.attach(model, compress="int4") as wire:
        start = wire.stats()
        for step in range(3):
            loss_of(model, rank.index, step).backward()
        end = wire.stats()
    sent = end.wire_bytes - start.wire_bytes
    assert end.steps == 3
    assert end.dense_bytes == 3 * 4 * elems
    assert end.dense_bytes / 10 < sent < end.dense_bytes / 2
    assert end.wait_s > 0
    assert end.wire_s > 0
    assert "int4" in wire.explain()
    assert "2 ranks" in wire.explain()
    return [sent]
