"""What every fusion plan must be, for random models, networks and encoders."""

from __future__ import annotations

from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.fusion_models import MODELS, published_profile
from thinwire.core import TensorSpec
from thinwire.fusion import (
    Curve,
    Groups,
    Profile,
    TensorProfile,
    groups_of_counts,
    offload,
    optimal_groups,
    parse_fusion,
    safusion_groups,
    simulate_split_step,
    simulate_step,
    ssfusion,
    tensor_counts,
)

PLANNERS = ("none", "auto", "3kB", "safusion", "ssfusion", "optimal")
seconds = st.sampled_from([0.0, 0.0, 1e-5, 1e-3, 2e-3, 5e-3, 0.02])
points = st.dictionaries(st.sampled_from([0.0, 100.0, 1e3, 1e4, 1e5]), seconds, min_size=1)
# Falling pieces included: planners may not count on measured curves being monotone.
curves = points.map(lambda values: Curve(tuple(sorted(values.items()))))
members = st.tuples(st.sampled_from([0, 1, 10, 100, 1000, 5000, 30_000]), seconds)


@st.composite
def profiles(draw: st.DrawFn, max_tensors: int = 30) -> Profile:
    sizes_and_gaps = draw(st.lists(members, min_size=0, max_size=max_tensors))
    ready = accumulate(gap for _, gap in sizes_and_gaps)
    tensors = tuple(
        TensorProfile(TensorSpec(f"t{i}", (size,)), at)
        for i, ((size, _), at) in enumerate(zip(sizes_and_gaps, ready, strict=True))
    )
    density = draw(st.sampled_from([1.0, 0.5, 0.1, 0.01]))
    return Profile(tensors, draw(curves), draw(curves), density, draw(st.sampled_from([4.0, 8.0, 0.53])))


@given(profile=profiles(), text=st.sampled_from(PLANNERS))
def test_every_tensor_is_in_exactly_one_group_and_the_order_is_kept(profile: Profile, text: str) -> None:
    groups = parse_fusion(text).plan(profile)
    assert tuple(tensor for group in groups for tensor in group) == profile.specs
    assert all(groups)
    assert groups_of_counts(profile.specs, tensor_counts(groups)) == groups


@given(profile=profiles(), text=st.sampled_from(PLANNERS))
def test_the_same_profile_gives_the_same_plan(profile: Profile, text: str) -> None:
    """Also after a trip through JSON, which is how other ranks and a checkpoint see it."""
    assert parse_fusion(text).plan(profile) == parse_fusion(text).plan(Profile.from_json(profile.to_json()))


@given(profile=profiles(), text=st.sampled_from(PLANNERS))
def test_no_planner_beats_optimal(profile: Profile, text: str) -> None:
    best_s = simulate_step(profile, optimal_groups(profile)).finish_s
    assert best_s <= simulate_step(profile, parse_fusion(text).plan(profile)).finish_s * (1 + 1e-9)


@given(profile=profiles(max_tensors=8))
def test_optimal_is_the_best_of_all_contiguous_groupings(profile: Profile) -> None:
    best_s = min(simulate_step(profile, groups).finish_s for groups in _all_groupings(profile))
    assert simulate_step(profile, optimal_groups(profile)).finish_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.parametrize(
    ("sizes", "ready_s", "encode_points", "message_points"),
    [
        ([5, 5, 5, 5], [1, 1, 2, 4], [(0, 3), (10, 8)], [(0, 1), (40, 9)]),
        ([5, 10, 3, 3], [0, 0, 3, 3], [(0, 3), (3, 5), (10, 5)], [(0, 0), (16, 0), (40, 7)]),
        ([2, 1, 5, 3, 3], [3, 3, 3, 4, 4], [(0, 1), (10, 3)], [(0, 0), (16, 0), (40, 5)]),
    ],
)
def test_optimal_keeps_an_early_encoder_where_encoding_is_the_bottleneck(
    sizes: list[int],
    ready_s: list[float],
    encode_points: list[tuple[float, float]],
    message_points: list[tuple[float, float]],
) -> None:
    """Found by search: here the plan whose wire is free first is the wrong one to continue."""
    tensors = [
        TensorProfile(TensorSpec(f"t{i}", (s,)), at) for i, (s, at) in enumerate(zip(sizes, ready_s, strict=True))
    ]
    profile = Profile(tuple(tensors), Curve(tuple(encode_points)), Curve(tuple(message_points)))
    best_s = min(simulate_step(profile, groups).finish_s for groups in _all_groupings(profile))
    assert simulate_step(profile, optimal_groups(profile)).finish_s == pytest.approx(best_s, rel=1e-9)


def _all_groupings(profile: Profile) -> list[Groups]:
    if not profile.specs:
        return [[]]
    groupings = []
    for cuts in product([False, True], repeat=len(profile.specs) - 1):
        bounds = [0, *(index + 1 for index, cut in enumerate(cuts) if cut), len(profile.specs)]
        groupings.append([profile.specs[a:b] for a, b in pairwise(bounds)])
    return groupings


@given(profile=profiles(), count=st.integers(1, 12))
def test_ssfusion_sends_its_budget_exactly(profile: Profile, count: int) -> None:
    for group in ssfusion(profile, count):
        total = sum(tensor.numel for tensor in group.tensors)
        dense = sum(tensor.numel for tensor in group.dense)
        assert {*group.dense, *group.sparse} == set(group.tensors)
        assert dense + group.sparse_elems == pytest.approx(profile.density * total)
        assert dense == 0 or dense < profile.density * total
        assert 0 < group.density <= profile.density


@given(profile=profiles(), count=st.integers(1, 12))
def test_no_feasible_cut_is_cheaper_than_the_chosen_one(profile: Profile, count: int) -> None:
    def cost_s(tensors: tuple[TensorSpec, ...], theta: int) -> float:
        selected = [t.numel for t in tensors if t.numel > theta]
        payload_bytes = 4.0 * sum(t.numel for t in tensors if t.numel <= theta)
        payload_bytes += sum(profile.bytes_per_elem * max(1, int(profile.density * numel)) for numel in selected)
        return sum(map(profile.encode, selected)) + profile.message(payload_bytes)

    for group in ssfusion(profile, count):
        budget = profile.density * sum(tensor.numel for tensor in group.tensors)
        for theta in {tensor.numel for tensor in group.tensors}:
            if sum(tensor.numel for tensor in group.tensors if tensor.numel <= theta) < budget:
                assert cost_s(group.tensors, group.theta_elems) <= cost_s(group.tensors, theta)


@given(profile=profiles(), text=st.sampled_from(PLANNERS))
def test_nothing_in_a_timeline_happens_too_early_or_twice_at_once(profile: Profile, text: str) -> None:
    timelines = [
        simulate_step(profile, parse_fusion(text).plan(profile)),
        simulate_split_step(profile, ssfusion(profile, 5)),
    ]
    for timeline in timelines:
        encoder_free_s = wire_free_s = 0.0
        for sent in timeline.messages:
            assert sent.encode_start_s >= max(sent.ready_s, encoder_free_s)
            assert sent.message_start_s >= max(sent.encode_end_s, wire_free_s)
            encoder_free_s, wire_free_s = sent.encode_end_s, sent.message_end_s
        assert timeline.exposed_s >= 0
        assert sum(sent.tensor_count for sent in timeline.messages) == len(profile.tensors)


@given(profile=profiles(), host=curves)
def test_offload_picks_tensors_of_its_group_in_order(profile: Profile, host: Curve) -> None:
    groups = safusion_groups(profile)
    for group, chosen in zip(groups, offload(profile, groups, host), strict=True):
        assert [tensor for tensor in group if tensor in chosen] == list(chosen)


@pytest.mark.parametrize("model", MODELS)
def test_optimal_copes_with_hundreds_of_tensors(model: str) -> None:
    """467 for ResNet-152; a search without exact pruning needs minutes and runs into the timeout."""
    profile = published_profile(model, 0.001)
    best_s = simulate_step(profile, optimal_groups(profile)).finish_s
    for text in PLANNERS[:-1]:
        assert best_s <= simulate_step(profile, parse_fusion(text).plan(profile)).finish_s * (1 + 1e-9)
