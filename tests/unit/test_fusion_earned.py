"""Messages that cost processor time are merged until merging no longer pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core import TensorSpec
from thinwire.fusion import (
    Curve,
    Profile,
    TensorProfile,
    merge_costly,
    optimal_groups,
    safusion_groups,
    simulate_step,
    unfused_groups,
)


def _profile(sizes: list[int], message_cost_s: float) -> Profile:
    tensors = tuple(TensorProfile(TensorSpec(f"t{i}", (n,)), 0.01 * (i + 1)) for i, n in enumerate(sizes))
    encode, message = Curve(((0, 1e-4), (10**6, 5e-3))), Curve(((0, 1e-3), (10**6, 0.05)))
    return Profile(tensors, encode, message, density=0.01, message_cost_s=message_cost_s)


def test_a_message_delays_what_comes_behind_it() -> None:
    free, costly = (_profile([1000] * 4, cost) for cost in (0.0, 0.002))
    groups = unfused_groups(free.specs)
    before, after = simulate_step(free, groups), simulate_step(costly, groups)
    assert after.backward_s == pytest.approx(before.backward_s + 4 * 0.002)
    assert [sent.ready_s for sent in after.messages] == pytest.approx(
        [sent.ready_s + 0.002 * i for i, sent in enumerate(before.messages)]
    )


def test_nothing_is_merged_where_messages_cost_nothing() -> None:
    profile = _profile([1000] * 6, 0.0)
    groups = unfused_groups(profile.specs)
    assert merge_costly(profile, groups) == groups


def test_expensive_messages_become_few() -> None:
    assert len(merge_costly(_profile([1000] * 12, 0.05), unfused_groups(_profile([1000] * 12, 0.05).specs))) == 1


@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=12), st.floats(0.0, 0.02))
def test_the_step_never_gets_longer_and_no_tensor_is_lost(sizes: list[int], cost: float) -> None:
    profile = _profile(sizes, cost)
    for plan in (safusion_groups, optimal_groups):
        groups = plan(profile)
        merged = merge_costly(profile, groups)
        assert [tensor for group in merged for tensor in group] == list(profile.specs)
        assert simulate_step(profile, merged).finish_s <= simulate_step(profile, groups).finish_s


def test_profiles_keep_the_cost() -> None:
    profile = _profile([10], 0.25)
    assert Profile.from_json(profile.to_json()) == profile
    assert replace(profile, message_cost_s=0.0) != profile
