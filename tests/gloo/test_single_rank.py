"""World size 1, and the mistakes that are found before any message is sent."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import thinwire
from gloo.support import ENGINES, Net, close, loss_of, mean_gradients, seeded, sgd, specs, train, wrap
from thinwire.autopilot.controller import PLANNING_STEPS
from thinwire.autopilot.expect import alone
from thinwire.observe.events import read_events

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("text", specs())
def test_one_rank_trains(single_rank_group: None, text: str, engine: str) -> None:
    model = wrap(engine, seeded(Net))
    optimizer = sgd(model)
    before = loss_of(model, 0, 0).item()
    with thinwire.attach(model, optimizer, compress=text) as wire:
        train(model, optimizer, 0, [0] * 8)
        assert wire.stats().wire_bytes == 0, "there is nobody to send to"
        assert "1 rank:" in wire.explain()
    assert loss_of(model, 0, 0).item() < before


@pytest.mark.parametrize("engine", ENGINES)
def test_dense_on_one_rank_changes_nothing(single_rank_group: None, engine: str) -> None:
    model = wrap(engine, seeded(Net))
    with thinwire.attach(model, compress="dense"):
        loss_of(model, 0, 0).backward()
    for parameter, expected in zip(model.parameters(), mean_gradients(seeded(Net), 1, 0).values(), strict=True):
        assert parameter.grad is not None
        close(parameter.grad, expected)


def test_auto_alone_is_dense_and_says_so(single_rank_group: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="thinwire")
    model = seeded(Net)
    with thinwire.attach(model) as wire:
        train(model, sgd(model), 0, range(PLANNING_STEPS + 30))
        assert wire.plan is not None
        assert wire.plan.compress == "dense"
        assert wire.stats().wire_bytes == 0
        state = wire.state_dict()
        with pytest.raises(thinwire.CheckpointError, match="plan in the checkpoint does not fit: plan is missing"):
            wire.load_state_dict({**state, "plan": "{}"})
    assert [record.message for record in caplog.records if "nobody to send anything to" in record.message]


def test_a_plan_from_elsewhere_is_followed_at_once(single_rank_group: None) -> None:
    plan = replace(alone(1.0, "safe"), compress="int8", fuse="1MiB")
    with thinwire.attach(seeded(Net), plan=plan) as wire:
        assert wire.state_dict()["compress"] == "route | int8"


def test_without_a_process_group() -> None:
    with pytest.raises(thinwire.ConfigError, match=r"init_process_group.*torchrun"):
        thinwire.attach(Net())


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({"compress": "zip"}, "Available: .*topk"),
        ({"fuse": "everything"}, "fuse is 'everything'"),
        ({"sync": "never"}, "every_step"),
        ({"plan": object()}, "expected a plan of the planner"),
        ({"plan": alone(1.0, "safe"), "compress": "int4"}, "leave out compress="),
        ({"quality": "perfect"}, "expected one of exact, safe, fast"),
    ],
)
def test_wrong_arguments(single_rank_group: None, arguments: dict[str, object], answer: str) -> None:
    with pytest.raises(thinwire.ConfigError, match=answer):
        thinwire.attach(Net(), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_dropped_model_ends_its_threads(single_rank_group: None, engine: str) -> None:
    """Nobody has called detach(): the wire goes with its module."""
    before = threading.active_count()
    model = wrap(engine, seeded(Net))
    optimizer = sgd(model)
    wire = thinwire.attach(model, optimizer, compress="int4")
    train(model, optimizer, 0, range(2))
    assert threading.active_count() > before
    del model, optimizer, wire
    gc.collect()
    assert threading.active_count() == before


def test_models_that_cannot_be_attached(single_rank_group: None) -> None:
    with pytest.raises(thinwire.ConfigError, match="no parameter that requires gradients"):
        thinwire.attach(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(thinwire.ConfigError, match=r"expected an nn\.Module"):
        thinwire.attach(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(thinwire.ConfigError, match=r"expected a torch\.optim\.Optimizer"):
        thinwire.attach(nn.Linear(2, 2), "adamw")  # type: ignore[arg-type]


def test_a_parameter_ready_twice_is_explained(single_rank_group: None) -> None:
    """Reentrant checkpointing runs backward passes inside the backward pass; here two of them reach the same layer."""
    layer, head = nn.Linear(3, 3), nn.Linear(3, 3)
    once = checkpoint(layer, torch.ones(1, 3, requires_grad=True), use_reentrant=True)
    twice = checkpoint(layer, once, use_reentrant=True)
    with (
        thinwire.attach(nn.Sequential(layer, head)),
        pytest.raises(thinwire.ConfigError, match=r"ready twice.*use_reentrant=False"),
    ):
        head(twice).sum().backward()


class Failing(torch.autograd.Function):
    """An error in the middle of a backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise KeyError("out of memory, say")


def fail_in_backward(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Failing.apply(x)  # type: ignore[no-untyped-call]
    return result


def test_an_interrupted_backward_pass_is_explained(single_rank_group: None) -> None:
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.Sequential(first, last)
    with thinwire.attach(model):
        with pytest.raises(KeyError):
            last(fail_in_backward(first(torch.ones(1, 3)))).sum().backward()
        with pytest.raises(thinwire.ConfigError, match=r"interrupted by an error, detach\(\) and attach\(\) again"):
            last(first(torch.ones(1, 3))).sum().backward()
    with thinwire.attach(model):
        model(torch.ones(1, 3)).sum().backward()


def test_a_forward_after_an_interrupted_backward_pass_goes_on(single_rank_group: None) -> None:
    """What the interrupted pass had begun is aborted: its step counts as skipped, and the next one is as ever."""
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.Sequential(first, last)
    with thinwire.attach(model) as wire:
        with pytest.raises(KeyError):
            last(fail_in_backward(first(torch.ones(1, 3)))).sum().backward()
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        assert (wire.stats().steps, wire.stats().skipped_steps) == (2, 1)
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    assert all(torch.equal(one, p.grad) for one, p in zip(gradients, model.parameters(), strict=True))


def test_events_are_recorded(single_rank_group: None, tmp_path: Path) -> None:
    model = seeded(Net)
    with thinwire.attach(model, events=str(tmp_path)):
        for _ in range(PLANNING_STEPS):
            loss_of(model, 0, 0).backward()
        loss_of(model, 0, 0)  # without an optimizer the next forward plans
    events = list(read_events(tmp_path / "rank0.jsonl"))
    assert [event["kind"] for event in events].count("step") == PLANNING_STEPS
    (plan,) = [event for event in events if event["kind"] == "plan"]
    assert (plan["step"], plan["compress"]) == (PLANNING_STEPS, "dense")
