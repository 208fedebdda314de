"""SSFusion: the size cut of a group, and which tensors the host should select."""

from __future__ import annotations

import pytest

from sim.fusion_models import published_profile
from thinwire.core import ConfigError, TensorSpec
from thinwire.fusion import Curve, Groups, Profile, TensorProfile, offload, ssfusion

CONSTANT = Curve(((0.0, 1.0),))


def _profile(sizes: list[int], encode: Curve, message: Curve, density: float = 0.1) -> Profile:
    tensors = tuple(TensorProfile(TensorSpec(f"t{i}", (size,)), float(i + 1)) for i, size in enumerate(sizes))
    return Profile(tensors, encode, message, density, bytes_per_elem=8.0)


def test_small_tensors_stay_dense_while_the_budget_lasts() -> None:
    """10 % of 1200 elements is 120: 50 + 50 may stay dense, another 100 may not; 20 are left for 1100 elements."""
    profile = _profile([1000, 50, 100, 50], encode=CONSTANT, message=Curve(((0.0, 0.0),)))
    (group,) = ssfusion(profile)
    assert group.theta_elems == 50
    assert [tensor.fqn for tensor in group.dense] == ["t1", "t3"]
    assert [tensor.fqn for tensor in group.sparse] == ["t0", "t2"]
    assert group.density == pytest.approx(20 / 1100)
    assert group.dense_bytes == 400
    assert group.sparse_elems == pytest.approx(20)


def test_nothing_stays_dense_where_selecting_is_cheaper_than_sending() -> None:
    profile = _profile([1000, 50, 100, 50], encode=Curve(((0.0, 0.0),)), message=Curve(((0.0, 0.0), (1.0, 1.0))))
    (group,) = ssfusion(profile)
    assert (group.theta_elems, group.density, group.dense) == (0, 0.1, ())


def test_groups_are_aligned_by_tensor_count() -> None:
    profile = published_profile("bert_base", 0.01)
    assert [len(group.tensors) for group in ssfusion(profile)] == [20] * 9 + [19]
    assert [len(group.tensors) for group in ssfusion(profile, 100)] == [100, 99]
    with pytest.raises(ConfigError, match="tensors_per_group is 0"):
        ssfusion(profile, 0)


def test_biases_and_norms_stay_dense_at_the_published_timings() -> None:
    """In a group of 20 of BERT-base the matrices make nearly all elements, and each selection costs a call."""
    for group in ssfusion(published_profile("bert_base", 0.01)):
        assert all(tensor in group.dense for tensor in group.tensors if tensor.numel <= 768)
        assert all(tensor in group.sparse for tensor in group.tensors if tensor.numel >= 3072)


def _names(groups: Groups) -> list[list[str]]:
    return [[tensor.fqn for tensor in group] for group in groups]


def test_the_host_takes_a_tensor_whenever_it_is_free() -> None:
    """A gradient each second, 2 s per selection on the host, 10 s on the device: the host takes every second one."""
    profile = _profile([10] * 5, encode=Curve(((0.0, 10.0),)), message=CONSTANT)
    assert _names(offload(profile, [profile.specs], Curve(((0.0, 2.0),)))) == [["t0", "t2", "t4"]]


def test_the_last_offload_is_undone_if_it_delays_the_group() -> None:
    """The device needs 0.1 s: with t4 on the host the group would be selected at 7 s, without at 5.1 s."""
    profile = _profile([10] * 5, encode=Curve(((0.0, 0.1),)), message=CONSTANT)
    assert _names(offload(profile, [profile.specs], Curve(((0.0, 2.0),)))) == [["t0", "t2"]]


def test_a_host_that_is_busy_with_one_group_is_not_free_for_the_next() -> None:
    """Both groups take 10 s on the device; the host takes t0 at 1 s and is busy until 4.5 s, so t2 and t3 must wait."""
    profile = _profile([10] * 4, encode=Curve(((0.0, 10.0),)), message=CONSTANT)
    groups = [profile.specs[:2], profile.specs[2:]]
    assert _names(offload(profile, groups, Curve(((0.0, 3.5),)))) == [["t0"], []]
    assert _names(offload(profile, groups, Curve(((0.0, 3.0),)))) == [["t0"], ["t3"]]


def test_a_slow_host_gets_nothing() -> None:
    profile = _profile([10] * 5, encode=Curve(((0.0, 0.1),)), message=CONSTANT)
    assert _names(offload(profile, [profile.specs], Curve(((0.0, 100.0),)))) == [[]]
