"""Curves, profiles and costs: interpolation, fitting noisy samples, JSON."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core import ConfigError, TensorSpec
from thinwire.fusion import Curve, GroupCosts, ModelProfile, Noise, TensorProfile

CURVE = Curve(((100.0, 1.0), (200.0, 3.0), (400.0, 4.0)))


@pytest.mark.parametrize(
    ("size", "seconds"), [(0, 1.0), (100, 1.0), (150, 2.0), (200, 3.0), (300, 3.5), (400, 4.0), (800, 6.0)]
)
def test_a_curve_is_flat_before_linear_between_and_goes_on_behind_its_points(size: float, seconds: float) -> None:
    assert CURVE(size) == seconds


def test_a_falling_curve_never_becomes_negative() -> None:
    assert Curve(((0.0, 1.0), (10.0, 0.5)))(1000) == 0.0


def test_one_point_makes_a_constant() -> None:
    assert Curve(((10.0, 0.5),))(0) == Curve(((10.0, 0.5),))(1e9) == 0.5


@pytest.mark.parametrize(
    "points", [(), ((1.0, 1.0), (1.0, 2.0)), ((2.0, 1.0), (1.0, 2.0)), ((1.0, -1.0),), ((1.0, math.nan),)]
)
def test_points_that_make_no_curve_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ConfigError):
        Curve(points)


def test_fitting_finds_startup_and_bandwidth_behind_noise_and_outliers() -> None:
    noise = random.Random(0)

    def true_s(size: float) -> float:
        return 1e-3 + size / 25e6

    sizes = [10 ** noise.uniform(2, 7) for _ in range(600)]
    samples = [(size, true_s(size) * noise.uniform(0.9, 1.1) * (20 if noise.random() < 0.1 else 1)) for size in sizes]
    curve = Curve.fit(samples)
    for size in (1e3, 1e5, 1e6, 5e6, 2e7):
        assert curve(size) == pytest.approx(true_s(size), rel=0.2)


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 10)), min_size=1, max_size=40),
    st.lists(st.floats(0, 4e9), min_size=2, max_size=5),
)
def test_a_fitted_curve_never_falls(samples: list[tuple[float, float]], sizes: list[float]) -> None:
    times = [Curve.fit(samples)(size) for size in sorted(sizes)]
    assert all(left <= right + 1e-9 for left, right in pairwise(times))


def test_bins_that_contradict_each_other_do_not_make_large_messages_free() -> None:
    curve = Curve.fit([(1e3, 1e-3), (1e6, 0.012), (3e6, 0.010)])
    assert curve.points[-1] == (2e6, 0.011)
    assert curve(2e7) > 0.1


def test_no_samples_are_refused() -> None:
    with pytest.raises(ConfigError):
        Curve.fit([])


def _profile() -> ModelProfile:
    tensors = (
        TensorProfile(TensorSpec("head.weight", (10, 100)), 0.010),
        TensorProfile(TensorSpec("head.bias", (10,), torch.bfloat16), 0.011),
    )
    return ModelProfile(
        tensors=tensors, backward_s=0.02, noise={"head.bias": Noise(1.0, 2.0)}, errors={"int4": {"a": 0.1}}
    )


def test_json_gives_the_same_profile_back() -> None:
    profile = _profile()
    assert ModelProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_a_profile_of_an_earlier_release_is_read() -> None:
    """The keys of version 1, as thinwire plan --save-profile wrote them."""
    tensor = {"fqn": "w", "shape": [2, 3], "dtype": "float32", "device": "cpu", "ready_s": 0.5}
    times = {"forward_s": 0.1, "backward_s": 0.6, "optimizer_s": 0.01, "flops": 1e9, "memory_bytes": 1e6}
    rest = {"slowdown": 2.0, "batch": 8, "noise": {"w": {"signal_sq": 1.0, "noise_sq": 2.0}}, "errors": {}}
    profile = ModelProfile.from_json({"version": 1, "tensors": [tensor], **times, **rest})
    assert profile.specs == (TensorSpec("w", (2, 3)),)
    assert (profile.compute_s, profile.slowdown, profile.batch) == (pytest.approx(0.71), 2.0, 8)


def test_an_unknown_dtype_is_named() -> None:
    values = _profile().to_json()
    values["tensors"][0]["dtype"] = "float3"
    with pytest.raises(ConfigError, match="float3"):
        ModelProfile.from_json(values)


def test_tensors_are_put_in_the_order_in_which_they_are_ready() -> None:
    late, early = TensorSpec("a", (1,)), TensorSpec("b", (1,))
    assert ModelProfile.in_ready_order({late: 2.0, early: 1.0}, backward_s=2.0).specs == (early, late)


def test_a_profile_without_some_tensors_is_the_same_step() -> None:
    rest = _profile().without({"head.weight"})
    assert [tensor.fqn for tensor in rest.specs] == ["head.bias"]
    assert rest.ready_s == (0.011,)
    assert rest.backward_s == 0.02


@pytest.mark.parametrize("ready_s", [(2.0, 1.0), (-1.0, 1.0), (math.nan, 1.0)])
def test_impossible_ready_times_are_refused(ready_s: tuple[float, ...]) -> None:
    tensors = tuple(TensorProfile(TensorSpec(f"t{i}", (3,)), at) for i, at in enumerate(ready_s))
    with pytest.raises(ConfigError):
        ModelProfile(tensors=tensors, backward_s=3.0)


@pytest.mark.parametrize(("density", "bytes_per_elem"), [(0.0, 4.0), (1.1, 4.0), (1.0, 0.0), (1.0, math.inf)])
def test_impossible_costs_are_refused(density: float, bytes_per_elem: float) -> None:
    with pytest.raises(ConfigError):
        GroupCosts(CURVE, CURVE, density, bytes_per_elem)


def test_every_tensor_sends_something_unless_it_is_empty() -> None:
    costs = GroupCosts(CURVE, CURVE, density=0.1, bytes_per_elem=8.0)
    assert [costs.payload_elems(numel) for numel in (0, 1, 9, 19, 1000)] == [0, 1, 1, 1, 100]
