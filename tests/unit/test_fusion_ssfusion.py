"""SSFusion: the size cut of a group, and which tensors the host should select."""

from __future__ import annotations

import pytest

from sim.fusion_models import Case, case, published
from thinwire.core import ConfigError
from thinwire.fusion import Curve, Groups, offload, ssfusion

CONSTANT = Curve(((0.0, 1.0),))


def _case(sizes: list[int], encode: Curve, message: Curve, density: float = 0.1) -> Case:
    return case(sizes, [float(i + 1) for i in range(len(sizes))], encode, message, density, bytes_per_elem=8.0)


def test_small_tensors_stay_dense_while_the_budget_lasts() -> None:
    """10 % of 1200 elements is 120: 50 + 50 may stay dense, another 100 may not; 20 are left for 1100 elements."""
    one = _case([1000, 50, 100, 50], encode=CONSTANT, message=Curve(((0.0, 0.0),)))
    (plan,) = ssfusion(one.profile, one.costs)
    assert plan.names == ("t0", "t1", "t2", "t3")
    assert plan.dense == ("t1", "t3")
    assert plan.density == pytest.approx(20 / 1100)
    assert plan.hosted == ()


def test_nothing_stays_dense_where_selecting_is_cheaper_than_sending() -> None:
    one = _case([1000, 50, 100, 50], encode=Curve(((0.0, 0.0),)), message=Curve(((0.0, 0.0), (1.0, 1.0))))
    (plan,) = ssfusion(one.profile, one.costs)
    assert (plan.dense, plan.density) == ((), 0.1)


def test_the_dense_part_travels_while_the_sparse_part_is_selected() -> None:
    """t0 (1000) is sparse, t1 and t2 (10 each) are dense: their message starts at 3 s, next to the encoding of t0."""
    one = case(
        [1000, 10, 10],
        [1.0, 2.0, 3.0],
        Curve(((0.0, 1.0), (1000.0, 4.0))),
        Curve(((0.0, 1.0),)),
        0.1,
        bytes_per_elem=8.0,
    )
    step = one.simulated_parts(ssfusion(one.profile, one.costs))
    spans = [(s.activity, s.group, s.start_s, s.end_s) for s in step.spans if s.activity in ("encode", "wire")]
    assert spans == [("encode", 0, 3.0, 3.0), ("wire", 0, 3.0, 4.0), ("encode", 1, 3.0, 7.0), ("wire", 1, 7.0, 8.0)]


def test_groups_are_aligned_by_tensor_count() -> None:
    one = published("bert_base", 0.01)
    assert [len(plan.names) for plan in ssfusion(one.profile, one.costs)] == [20] * 9 + [19]
    assert [len(plan.names) for plan in ssfusion(one.profile, one.costs, 100)] == [100, 99]
    with pytest.raises(ConfigError, match="tensors_per_group is 0"):
        ssfusion(one.profile, one.costs, 0)


def test_biases_and_norms_stay_dense_at_the_published_timings() -> None:
    """In a group of 20 of BERT-base the matrices make nearly all elements, and each selection costs a call."""
    one = published("bert_base", 0.01)
    sizes = {tensor.fqn: tensor.numel for tensor in one.profile.specs}
    for plan in ssfusion(one.profile, one.costs):
        assert all(name in plan.dense for name in plan.names if sizes[name] <= 768)
        assert all(name not in plan.dense for name in plan.names if sizes[name] >= 3072)


def _offloaded(one: Case, groups: Groups, host: Curve) -> Groups:
    return offload(one.profile, one.costs.encode, groups, host)


def _names(groups: Groups) -> list[list[str]]:
    return [[tensor.fqn for tensor in group] for group in groups]


def test_the_host_takes_a_tensor_whenever_it_is_free() -> None:
    """A gradient each second, 2 s per selection on the host, 10 s on the device: the host takes every second one."""
    one = _case([10] * 5, encode=Curve(((0.0, 10.0),)), message=CONSTANT)
    assert _names(_offloaded(one, [one.profile.specs], Curve(((0.0, 2.0),)))) == [["t0", "t2", "t4"]]


def test_the_last_offload_is_undone_if_it_delays_the_group() -> None:
    """The device needs 0.1 s: with t4 on the host the group would be selected at 7 s, without at 5.1 s."""
    one = _case([10] * 5, encode=Curve(((0.0, 0.1),)), message=CONSTANT)
    assert _names(_offloaded(one, [one.profile.specs], Curve(((0.0, 2.0),)))) == [["t0", "t2"]]


def test_a_host_that_is_busy_with_one_group_is_not_free_for_the_next() -> None:
    """Both groups take 10 s on the device; the host takes t0 at 1 s and is busy until 4.5 s, so t2 and t3 must wait."""
    one = _case([10] * 4, encode=Curve(((0.0, 10.0),)), message=CONSTANT)
    groups = [one.profile.specs[:2], one.profile.specs[2:]]
    assert _names(_offloaded(one, groups, Curve(((0.0, 3.5),)))) == [["t0"], []]
    assert _names(_offloaded(one, groups, Curve(((0.0, 3.0),)))) == [["t0"], ["t3"]]


def test_a_slow_host_gets_nothing() -> None:
    one = _case([10] * 5, encode=Curve(((0.0, 0.1),)), message=CONSTANT)
    assert _names(_offloaded(one, [one.profile.specs], Curve(((0.0, 100.0),)))) == [[]]
