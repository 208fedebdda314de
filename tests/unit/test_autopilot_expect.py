"""Planning from the times of real steps, and what becomes of a plan that does not hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import thinwire.api  # noqa: F401  (fills the registry)
from thinwire.autopilot.expect import (
    StepTimes,
    alone,
    auto_specs,
    back_to_dense,
    expectations,
    lost,
    noise_over_ranks,
    profile_of_steps,
    ready_times,
    summary,
)
from thinwire.core import TensorSpec
from thinwire.plan import Plan
from thinwire.plan.result import Candidate

TENSORS = [TensorSpec("first", (64, 64)), TensorSpec("last", (64, 64)), TensorSpec("unused", (8,))]


def steps(before_s: float = 0.1) -> list[StepTimes]:
    """The last layer's gradient is ready first; one step was disturbed."""
    return [StepTimes(before_s, {"last": 0.0, "first": 0.2 + extra_s}, 9.0) for extra_s in (0.0, 0.0, 5.0)]


def candidate(compress: str, step_s: float) -> Candidate:
    return Candidate(
        compress=compress,
        fuse="4MiB",
        step_s=step_s,
        wire_bytes=1,
        memory_bytes=0,
        messages=1,
        relative_error=0.0,
        allowed=True,
        verdict="chosen" if compress == "int4" else "slower",
    )


def plan(compress: str = "int4") -> Plan:
    """A floor of 1 s, to which int4 adds 0.1 s and dense 1 s."""
    steps_s = {"int4": 1.1, "dense": 2.0}
    return Plan(
        compress=compress,
        fuse="4MiB",
        quality="safe",
        world_size=4,
        step_s=steps_s[compress],
        floor_s=1.0,
        dense_s=2.0,
        reasons=("The floor is 1 s.", "int4 sends less."),
        candidates=tuple(candidate(name, step_s) for name, step_s in steps_s.items()),
    )


def test_profile_is_the_median_in_ready_order() -> None:
    profile = profile_of_steps(TENSORS, ready_times(TENSORS, steps()), slowdown=2.0)
    assert [tensor.fqn for tensor in profile.specs] == ["last", "first", "unused"]
    assert [one.ready_s for one in profile.tensors] == pytest.approx([0.0, 0.2, 0.2])
    assert (profile.forward_s, profile.backward_s) == pytest.approx((0.1, 0.2))
    assert profile.slowdown == 2.0


def test_what_the_parts_of_a_step_take_adds_up_to_the_step() -> None:
    """Where ranks share cores a step has a long forward or a long backward: the medians of both are no step at all."""
    long_forward, long_backward = (
        StepTimes(0.6, {"last": 0.0, "first": 0.2}, 9.0),
        StepTimes(0.2, {"last": 0.0, "first": 0.6}, 9.0),
    )
    taken = [long_forward, long_backward] * 3 + [StepTimes(0.2, {"last": 0.0, "first": 0.2}, 9.0)]
    assert profile_of_steps(TENSORS, ready_times(TENSORS, taken), slowdown=1.0).compute_s == pytest.approx(0.8)


def test_a_gradient_is_ready_when_the_last_rank_has_it() -> None:
    """One rank has the last layer's gradient late, the other the first one's."""
    ranks = [{"last": 0.0, "first": 0.5}, {"last": 0.2, "first": 0.3}]
    tables = [ready_times(TENSORS, [StepTimes(0.1, ready_s, 9.0)]) for ready_s in ranks]
    profile = profile_of_steps(TENSORS, torch.stack(tables).amax(dim=0), slowdown=1.0)
    assert (profile.forward_s, profile.backward_s) == pytest.approx((0.3, 0.3))


def test_a_step_without_gradients_is_all_forward() -> None:
    assert StepTimes(0.5, {}, 0.6).compute_s == 0.5


def test_sparsifiers_only_for_those_who_ask_and_know_ages() -> None:
    few_bits = auto_specs("safe", reads_ages=True)
    assert few_bits[0] == "dense"
    assert set(few_bits) == {"dense", "bf16", "int4", "int8"}
    assert auto_specs("fast", reads_ages=False) == few_bits
    assert any(spec.startswith("topk") for spec in auto_specs("fast", reads_ages=True))
    assert not any(spec.startswith("topk") for spec in auto_specs("exact", reads_ages=True))


def test_noise_is_what_the_mean_over_ranks_loses() -> None:
    """Ranks that agree have no noise; ranks that have nothing in common have no signal."""
    generator = torch.Generator().manual_seed(0)
    signal, noises = torch.randn(5000, generator=generator), torch.randn(4, 5000, generator=generator)
    gradients = signal + 2 * noises
    local_sq = [{"w": float(one.square().sum())} for one in gradients]
    found = noise_over_ranks(local_sq, {"w": float(gradients.mean(0).square().sum())})["w"]
    assert found.signal_sq == pytest.approx(5000, rel=0.15)
    assert found.noise_sq == pytest.approx(4 * 5000, rel=0.05)
    same = noise_over_ranks([{"w": 3.0}] * 2, {"w": 3.0})["w"]
    assert (same.signal_sq, same.noise_sq) == (3.0, 0.0)


def test_what_is_observed_needs_no_prediction() -> None:
    assert expectations(plan("dense"), "dense", observed_s=2.4) == (2.4, 2.4)
    assert expectations(plan(), "int4", observed_s=1.5)[0] == 1.5


def test_others_are_corrected_by_what_is_in_use() -> None:
    """Dense adds 1.5 s to the floor, not 1 s: then int4 adds 0.15 s, not 0.1 s."""
    assert expectations(plan(), "dense", observed_s=2.5) == pytest.approx((1.15, 2.5))


@pytest.mark.parametrize(("observed_s", "expected_s"), [(0.5, 1.05), (50.0, 1.2)])
def test_corrections_are_bounded(observed_s: float, expected_s: float) -> None:
    assert expectations(plan(), "dense", observed_s)[0] == pytest.approx(expected_s)


def test_a_choice_is_lost_only_if_it_is_made_again_on_the_same_network() -> None:
    before = plan()
    assert lost(before, plan())
    assert not lost(before, replace(plan(), dense_s=3 * before.dense_s))  # the link fell during the trial
    assert not lost(before, replace(plan(), compress="bf16"))


def test_back_to_dense_says_why() -> None:
    dense = back_to_dense(plan(), observed_s=2.2, dense_s=2.0)
    assert (dense.compress, dense.step_s) == ("dense", 2.0)
    assert {one.compress: one.verdict for one in dense.candidates} == {
        "int4": "measured, and slower than dense",
        "dense": "chosen",
    }
    assert "int4 took 2200.0 ms, dense 2000.0 ms: back to dense." in dense.explain()
    assert Plan.from_json(dense.to_json()) == dense


def test_one_rank_has_a_plan_too() -> None:
    made = alone(0.3, "safe")
    assert made.compress == "dense"
    assert "nobody to send anything to" in made.explain()


def test_summary_is_one_line_with_the_reason() -> None:
    line = summary(plan())
    assert line == "int4, fuse=4MiB: 1.1 s predicted, dense 2 s, floor 1 s. int4 sends less."
    assert "nobody" in summary(alone(0.3, "safe"))
