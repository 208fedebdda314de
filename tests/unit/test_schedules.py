"""Numbers that follow the step: their values, their text, and what compressors make of them."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contract.world import run_unit
from thinwire.compressors.topk import TopK
from thinwire.core import AllReduce, Compressor, ConfigError, Exchange, Exchanged, Schedule, State, Step, UnitSpec, make
from thinwire.core.schedule import SHAPES

UNIT = UnitSpec.flat(1000)


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ("linear", [0.25, 0.25, 0.1875, 0.1255, 0.063, 0.001, 0.001]),
        ("exp", [0.25, 0.25, 0.06287, 0.01581, 0.003976, 0.001, 0.001]),
        ("warmup", [0.25, 0.25, 0.06287, 0.01581, 0.003976, 0.001, 0.001]),
        ("anneal", [0.25, 0.25, 0.21353, 0.1255, 0.03747, 0.001, 0.001]),
    ],
)
def test_values(shape: str, values: list[float]) -> None:
    schedule = Schedule(shape, 0.25, 0.001, steps=40, after=10)
    assert [schedule.at(step) for step in (0, 10, 20, 30, 40, 50, 1000)] == pytest.approx(values, rel=1e-2)


def test_a_warmup_climbs_in_stairs() -> None:
    schedule = Schedule("warmup", 0.25, 0.001, steps=400)
    values = [schedule.at(step) for step in range(401)]
    assert len(set(values)) == 5
    assert [values.index(value) for value in sorted(set(values), reverse=True)] == [0, 100, 200, 300, 400]


@given(st.sampled_from(sorted(SHAPES)), st.floats(1e-4, 1), st.floats(1e-4, 1), st.integers(1, 99), st.integers(0, 9))
def test_it_runs_from_start_to_end_and_never_beyond(
    shape: str, start: float, end: float, steps: int, after: int
) -> None:
    schedule = Schedule(shape, start, end, steps, after)
    values = [schedule.at(step) for step in range(after + steps + 2)]
    assert values[0] == pytest.approx(start)
    assert values[-1] == end
    low, high = sorted((start, end))
    assert all(low * (1 - 1e-9) <= value <= high * (1 + 1e-9) for value in values)
    assert values in (sorted(values), sorted(values, reverse=True)) or start == pytest.approx(end)


@pytest.mark.parametrize(
    "spec",
    [
        "topk(density=warmup(0.25, 0.01, steps=200))",
        "ef | randomk(density=exp(0.5, 0.05, steps=10, after=5))",
        "topk(density=anneal(0.01, 0.1, steps=3)) | fp16",
        "adtopk(density=linear(0.1, 0.01, steps=1000))",
        "bank(density=warmup(1, 0.01, steps=7), mode='shared')",
    ],
)
def test_text_form(spec: str) -> None:
    compressor = make(spec)
    assert str(compressor) == spec
    assert make(spec) == compressor
    assert hash(make(spec)) == hash(compressor)
    assert pickle.loads(pickle.dumps(compressor)) == copy.deepcopy(compressor) == compressor
    assert str(copy.deepcopy(compressor)) == spec


def test_start_and_end_may_be_named() -> None:
    assert str(make("topk(density=exp(start=0.5, end=0.1, steps=4))")) == "topk(density=exp(0.5, 0.1, steps=4))"


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        ("topk(density=warmup(0.25))", r"write warmup\(0.25, 0.01, steps=200\)"),
        ("topk(density=warmup(0.25, 0.01, 5, 6, 7))", "write warmup"),
        ("topk(density=warmup(0.25, 0.01, steps=5, until=3))", "write warmup"),
        ("topk(density=warmup(0.25, 0.01, steps=0))", "steps is 0"),
        ("topk(density=warmup(0.25, 0.01, steps=1.5))", "steps is 1.5"),
        ("topk(density=warmup(0.25, 0.01, steps=5, after=-1))", "after is -1"),
        ("topk(density=exp(0, 0.01, steps=5))", "start is 0"),
        ("topk(density=exp('a', 0.01, steps=5))", "start is 'a'"),
        ("topk(density=exp(exp(1, 1, steps=1), 0.01, steps=5))", r"start is exp\(1"),
        ("topk(density=linear(0.5, 2, steps=5))", "density is linear"),
        ("topk(density=sudden(0.5, 0.1, steps=5))", "not a number"),
        ("topk(values=exp(0.5, 0.1, steps=5))", "values cannot follow a schedule"),
        ("ef(decay=linear(0.5, 1, steps=5)) | topk", "none of its arguments can"),
    ],
)
def test_mistakes_are_answered(spec: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        make(spec)


def test_as_a_number_it_is_its_end_but_as_a_setting_it_is_itself() -> None:
    schedule = Schedule("exp", 0.5, 0.01, steps=10)
    assert schedule + 0 == 0.01
    assert json.dumps(schedule) == "0.01"
    assert schedule != 0.01
    assert TopK(density=schedule) != TopK(density=0.01)
    assert len({TopK(density=schedule), TopK(density=0.01)}) == 2


@pytest.mark.parametrize("name", ["topk", "randomk", "bank", "adtopk"])
def test_every_step_sends_its_own_density_and_is_priced_so(name: str) -> None:
    compressor = make(f"ef | {name}(density=exp(0.5, 0.05, steps=4))")
    gradients = [
        [torch.randn(1000, generator=torch.Generator().manual_seed(9 * i + r)) for r in range(2)] for i in range(6)
    ]
    rounds = run_unit(compressor, UNIT, gradients)
    for index, done in enumerate(rounds):
        expected = 0.5 * 0.1 ** (min(index, 4) / 4)
        for state in (done.results[0].state, done.results[1].state):
            sent = 1000 - int((state["residual"] != 0).sum())
            assert sent == pytest.approx(1000 * expected, rel=0.03)
        if name != "adtopk":  # its bytes are an average of two phases
            assert done.sent_bytes == [compressor.at(index).wire_bytes(UNIT, 2)] * 2
    assert not compressor.exact_bytes
    assert compressor.wire_bytes(UNIT, 2) == compressor.at(4).wire_bytes(UNIT, 2)
    assert compressor.at(9) == make(f"ef | {name}(density=0.05)")


def test_without_a_schedule_nothing_is_made_anew() -> None:
    compressor = make("route | ef | topk(density=0.1)")
    assert compressor.at(3) is compressor
    assert compressor.exact_bytes


def test_any_field_can_be_declared() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Budgeted(Compressor):
        name = "budgeted"
        scheduled = ("budget",)
        budget: float = 0.3

        def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
            return Exchanged((yield AllReduce(x)), None, state)

        def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
            return int(self.budget * unit.dense_bytes)

    budgeted = Budgeted(budget=Schedule("anneal", 1.0, 0.3, steps=10))
    assert str(budgeted) == "budgeted(budget=anneal(1.0, 0.3, steps=10))"
    assert budgeted.at(0).wire_bytes(UNIT, 2) == 4000
    assert budgeted.wire_bytes(UNIT, 2) == budgeted.at(10).wire_bytes(UNIT, 2) == 1200
