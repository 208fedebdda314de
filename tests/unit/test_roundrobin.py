"""Layers that take turns, and what all layer selections share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contract.world import Round, run_unit
from thinwire.core import Compressor, ConfigError, TensorSpec, UnitSpec, make
from thinwire.fusion.prepare import prepare
from thinwire.wrappers.layers import layers_of, spend

UNIT = UnitSpec(tuple(TensorSpec(f"block{i}.weight", (8, 8)) for i in range(6)))
FREE = "warmup=0, always_bytes=0, merge_bytes=0"


def gradients(steps: int, world_size: int, unit: UnitSpec = UNIT) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [[torch.randn(unit.numel, generator=generator) for _ in range(world_size)] for _ in range(steps)]


def run(spec: str, steps: int, world_size: int = 2, unit: UnitSpec = UNIT) -> list[Round]:
    return run_unit(make(spec), unit, gradients(steps, world_size, unit))


def sent_layers(done: Round, unit: UnitSpec = UNIT) -> list[bool]:
    return [bool(part.any()) for part in done.results[0].mean.split(unit.sizes)]


def test_layers_take_turns_and_keep_to_the_budget() -> None:
    rounds = run(f"roundrobin(budget=0.5, {FREE}) | dense", 13)
    assert all(sent_layers(rounds[0])), "before anything was decided all go"
    later = [sent_layers(done) for done in rounds[1:]]
    assert [sum(step) for step in later] == [3] * 12
    assert all(later[step] != later[step + 1] for step in range(11))
    assert all(sum(step[layer] for step in later) == 6 for layer in range(6))
    dense = make("dense").wire_bytes(UNIT, 2)
    assert all(done.sent_bytes == [dense // 2] * 2 for done in rounds[1:])


def test_what_waits_is_sent_later_and_nothing_is_lost() -> None:
    steps = 10
    given = gradients(steps, 2)
    rounds = run_unit(make(f"roundrobin(budget=0.3, {FREE}) | ef | topk(density=0.2)"), UNIT, given)
    applied = sum(done.results[0].mean for done in rounds)
    waiting = torch.stack([result.state["residual"] for result in rounds[-1].results]).mean(dim=0)
    total = torch.stack([torch.stack(ranks).mean(dim=0) for ranks in given]).sum(dim=0)
    torch.testing.assert_close(applied + waiting, total)


@pytest.mark.parametrize("inner", ["dense", "ef | topk(density=0.1)"])
def test_layers_that_are_not_picked_receive_exactly_nothing(inner: str) -> None:
    compressor = make(f"roundrobin(budget=0.3, {FREE}) | {inner}")
    assert compressor.sparse
    done = run_unit(compressor, UNIT, gradients(4, 2))[3]
    picked = done.before[0]["layer_picked"].tolist()
    assert not all(picked)
    for on, mean, residual, old, x in zip(
        picked,
        *(one.split(UNIT.sizes) for one in (done.results[0].mean, done.results[0].state["residual"])),
        *(one.split(UNIT.sizes) for one in (done.before_copies[0]["residual"], done.inputs[0])),
        strict=True,
    ):
        if not on:
            assert not mean.any()
            assert torch.equal(residual, x + old)


def test_a_layer_larger_than_the_budget_is_paid_for_later() -> None:
    alone = UnitSpec(UNIT.tensors[:1])
    sent = [sent_layers(done, alone)[0] for done in run(f"roundrobin(budget=0.25, {FREE}) | dense", 41, 1, alone)]
    assert sum(sent[1:]) == 10


def test_warm_up_sends_everything_then_the_budget_falls() -> None:
    spec = "roundrobin(budget=0.34, warmup=4, always_bytes=0, merge_bytes=0) | dense"
    counts = [sum(sent_layers(done)) for done in run(spec, 20)]
    assert counts[:5] == [6] * 5
    assert 2 <= sum(counts[9:]) / 11 <= 2.2
    assert 2 < sum(counts[5:8]) / 3 < 6


def test_age_forces_a_layer() -> None:
    picked, left = spend([0.5, 0.3, 0.2], [False, True, False], [1.0, 0.0, 2.0], credit=0.1)
    assert picked == [False, True, False]
    assert left == pytest.approx(-0.2)


def test_spending_stops_when_the_credit_is_used_up() -> None:
    picked, left = spend([0.5, 0.3, 0.2], [False] * 3, [1.0, 3.0, 2.0], credit=0.4)
    assert picked == [False, True, True]
    assert left == pytest.approx(-0.1)


def test_modules_are_layers_and_tiny_neighbours_are_merged() -> None:
    shapes = {"a.w": (64, 64), "a.v": (64, 64), "b.w": (8, 8), "c.w": (8, 8), "d.w": (64, 64), "e.w": (8, 8)}
    unit = UnitSpec(tuple(TensorSpec(name, shape) for name, shape in shapes.items()))
    assert layers_of(unit, 0).members == ((0, 1), (2,), (3,), (4,), (5,))
    assert layers_of(unit, 1024).members == ((0, 1), (2, 3), (4,), (5,))


def test_vectors_and_small_tensors_always_go() -> None:
    compressor = prepare("roundrobin | topk(density=0.01)")
    routed = {shape: str(compressor.route(TensorSpec("x", shape))) for shape in ((9000,), (32, 64), (64, 64))}
    assert routed[(9000,)] == "dense"
    assert routed[(32, 64)] == "ef | topk(density=0.01)"
    assert routed[(64, 64)] == "roundrobin | ef | topk(density=0.01)"


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("roundrobin(budget=0) | dense", "budget is 0"),
        ("roundrobin(budget=0.05) | dense", "max_age=19 or more"),
        ("roundrobin(warmup=-1) | dense", "cannot be negative"),
        ("roundrobin | normgreedy | dense", "only one of them"),
        ("roundrobin | momentum | topk", "put momentum first"),
        ("roundrobin | dgc", "put momentum first"),
    ],
)
def test_what_makes_no_sense_is_refused(spec: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make(spec)


def test_budget_follows_a_schedule() -> None:
    spec = f"roundrobin(budget=linear(1.0, 0.5, steps=4), {FREE}) | dense"
    compressor: Compressor = make(spec)
    assert make(str(compressor)) == compressor
    assert [sum(sent_layers(done)) for done in run(spec, 8)][-3:] == [3, 3, 3]
