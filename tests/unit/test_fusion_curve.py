"""Curves and profiles: interpolation, fitting noisy samples, drift, JSON."""

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
from thinwire.fusion import Curve, Profile, TensorProfile

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


def _profile(scale: float = 1.0, encode: float = 1.0, message: float = 1.0) -> Profile:
    tensors = (
        TensorProfile(TensorSpec("head.weight", (10, 100)), 0.010 * scale),
        TensorProfile(TensorSpec("head.bias", (10,), torch.bfloat16), 0.011 * scale),
    )
    curves = [Curve(((0.0, 1e-4 * factor), (1000.0, 1e-3 * factor))) for factor in (encode, message)]
    return Profile(tensors, curves[0], curves[1], density=0.1, bytes_per_elem=8.0)


def test_json_gives_the_same_profile_back() -> None:
    profile = _profile()
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_an_unknown_dtype_is_named() -> None:
    values = _profile().to_json()
    values["tensors"][0]["dtype"] = "float3"
    with pytest.raises(ConfigError, match="float3"):
        Profile.from_json(values)


@pytest.mark.parametrize("what", ["scale", "encode", "message"])
@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_each_kind_of_drift_is_seen(what: str, factor: float) -> None:
    assert _profile().relative_drift(_profile(**{what: factor})) == pytest.approx(0.2)


def test_drift_counts_the_groups_in_use() -> None:
    """Start-up doubled, bandwidth as before: one message feels it less than two do."""
    before, after = _profile(), _profile()
    slow = Curve(((0.0, 2e-4), (1000.0, 1.1e-3)))
    after = Profile(after.tensors, after.encode, slow, after.density, after.bytes_per_elem)
    assert before.relative_drift(after, [before.specs]) < before.relative_drift(after)
    assert before.relative_drift(before) == 0.0


def test_other_tensors_are_infinite_drift() -> None:
    profile = _profile()
    other = Profile(profile.tensors[:1], profile.encode, profile.message, profile.density, profile.bytes_per_elem)
    assert profile.relative_drift(other) == math.inf


@pytest.mark.parametrize(
    ("ready_s", "density", "bytes_per_elem"),
    [
        ((2.0, 1.0), 1.0, 4.0),
        ((-1.0, 1.0), 1.0, 4.0),
        ((1.0, 2.0), 0.0, 4.0),
        ((1.0, 2.0), 1.1, 4.0),
        ((1.0, 2.0), 1.0, 0.0),
    ],
)
def test_impossible_profiles_are_refused(ready_s: tuple[float, ...], density: float, bytes_per_elem: float) -> None:
    tensors = tuple(TensorProfile(TensorSpec(f"t{i}", (3,)), at) for i, at in enumerate(ready_s))
    with pytest.raises(ConfigError):
        Profile(tensors, CURVE, CURVE, density, bytes_per_elem)


def test_every_tensor_sends_something_unless_it_is_empty() -> None:
    assert [_profile().payload_elems(numel) for numel in (0, 1, 9, 19, 1000)] == [0, 1, 1, 1, 100]
