"""What every fusion plan must be, for random models, networks and encoders."""

from __future__ import annotations

from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.fusion_models import MODELS, Case, case, published
from thinwire.fusion import (
    Curve,
    GroupPlan,
    Groups,
    ModelProfile,
    groups_of_counts,
    offload,
    optimal_groups,
    parse_fusion,
    safusion_groups,
    ssfusion,
)

PLANNERS = ("none", "auto", "3kB", "safusion", "ssfusion", "optimal")
seconds = st.sampled_from([0.0, 0.0, 1e-5, 1e-3, 2e-3, 5e-3, 0.02])
points = st.dictionaries(st.sampled_from([0.0, 100.0, 1e3, 1e4, 1e5]), seconds, min_size=1)
# Falling pieces included: planners may not count on measured curves being monotone.
curves = points.map(lambda values: Curve(tuple(sorted(values.items()))))
members = st.tuples(st.sampled_from([0, 1, 10, 100, 1000, 5000, 30_000]), seconds)


@st.composite
def cases(draw: st.DrawFn, max_tensors: int = 30) -> Case:
    sizes_and_gaps = draw(st.lists(members, min_size=0, max_size=max_tensors))
    ready_s = list(accumulate(gap for _, gap in sizes_and_gaps))
    density = draw(st.sampled_from([1.0, 0.5, 0.1, 0.01]))
    sizes, per_elem = [size for size, _ in sizes_and_gaps], draw(st.sampled_from([4.0, 8.0, 0.53]))
    return case(sizes, ready_s, draw(curves), draw(curves), density, per_elem)


def _planned(one: Case, text: str) -> Groups:
    return parse_fusion(text).plan(one.profile, one.costs)


def _optimal_s(one: Case) -> float:
    return one.finish_s(optimal_groups(one.profile, one.costs))


@given(one=cases(), text=st.sampled_from(PLANNERS))
def test_every_tensor_is_in_exactly_one_group_and_the_order_is_kept(one: Case, text: str) -> None:
    groups, specs = _planned(one, text), one.profile.specs
    assert tuple(tensor for group in groups for tensor in group) == specs
    assert all(groups)
    assert groups_of_counts(specs, [len(group) for group in groups]) == groups


@given(one=cases(), text=st.sampled_from(PLANNERS))
def test_the_same_profile_gives_the_same_plan(one: Case, text: str) -> None:
    """Also after a trip through JSON, which is how a saved profile comes back."""
    again = Case(ModelProfile.from_json(one.profile.to_json()), one.costs)
    assert _planned(one, text) == _planned(again, text)


@given(one=cases(), text=st.sampled_from(PLANNERS))
def test_no_planner_beats_optimal(one: Case, text: str) -> None:
    assert _optimal_s(one) <= one.finish_s(_planned(one, text)) * (1 + 1e-9)


@given(one=cases(max_tensors=8))
def test_optimal_is_the_best_of_all_contiguous_groupings(one: Case) -> None:
    best_s = min(one.finish_s(groups) for groups in _all_groupings(one.profile))
    assert _optimal_s(one) == pytest.approx(best_s, rel=1e-9)


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
    one = case(sizes, ready_s, Curve(tuple(encode_points)), Curve(tuple(message_points)))
    best_s = min(one.finish_s(groups) for groups in _all_groupings(one.profile))
    assert _optimal_s(one) == pytest.approx(best_s, rel=1e-9)


def _all_groupings(profile: ModelProfile) -> list[Groups]:
    if not profile.specs:
        return [[]]
    groupings = []
    for cuts in product([False, True], repeat=len(profile.specs) - 1):
        bounds = [0, *(index + 1 for index, cut in enumerate(cuts) if cut), len(profile.specs)]
        groupings.append([profile.specs[a:b] for a, b in pairwise(bounds)])
    return groupings


def _parts(one: Case, plan: GroupPlan) -> tuple[list[int], list[int]]:
    """Sizes of the dense tensors and of the others."""
    sizes = {tensor.fqn: tensor.numel for tensor in one.profile.specs}
    dense = [sizes[name] for name in plan.dense]
    return dense, [sizes[name] for name in plan.names if name not in plan.dense]


@given(one=cases(), count=st.integers(1, 12))
def test_ssfusion_sends_its_budget_exactly(one: Case, count: int) -> None:
    for plan in ssfusion(one.profile, one.costs, count):
        dense, sparse = _parts(one, plan)
        assert len(dense) + len(sparse) == len(plan.names)
        if plan.density is None:
            assert not sparse
            assert sum(dense) == 0, "only what is empty needs no density"
            continue
        budget = one.costs.density * (sum(dense) + sum(sparse))
        assert sum(dense) + plan.density * sum(sparse) == pytest.approx(budget)
        assert sum(dense) == 0 or sum(dense) < budget
        assert 0 < plan.density <= one.costs.density


@given(one=cases(), count=st.integers(1, 12))
def test_no_feasible_cut_is_cheaper_than_the_chosen_one(one: Case, count: int) -> None:
    costs = one.costs

    def cost_s(sizes: list[int], theta: int) -> float:
        selected = [size for size in sizes if size > theta]
        payload_bytes = 4.0 * sum(size for size in sizes if size <= theta)
        payload_bytes += sum(costs.bytes_per_elem * max(1, int(costs.density * numel)) for numel in selected)
        return sum(map(costs.encode, selected)) + costs.message(payload_bytes)

    for plan in ssfusion(one.profile, costs, count):
        dense, sparse = _parts(one, plan)
        chosen, sizes = max(dense, default=0), dense + sparse
        assert all(size > chosen for size in sparse), "one size cuts the group"
        for theta in set(sizes):
            if sum(size for size in sizes if size <= theta) < costs.density * sum(sizes):
                assert cost_s(sizes, chosen) <= cost_s(sizes, theta) * (1 + 1e-12)


@given(one=cases(), text=st.sampled_from(PLANNERS))
def test_nothing_in_a_step_happens_too_early_or_twice_at_once(one: Case, text: str) -> None:
    groups = _planned(one, text)
    ready_s = dict(zip(one.profile.specs, one.profile.ready_s, strict=True))
    for step in (one.simulated(groups), one.simulated_parts(ssfusion(one.profile, one.costs, 5))):
        encoded_s: dict[int, float] = {}
        for lane in ("encode", "wire"):
            free_s = 0.0
            for span in (span for span in step.spans if span.activity == lane):
                assert span.start_s >= max(free_s, encoded_s.get(span.group, 0.0) if lane == "wire" else 0.0)
                free_s = span.end_s
                encoded_s[span.group] = span.end_s
        assert step.wait_s >= 0
    encodes = {span.group: span.start_s for span in one.simulated(groups).spans if span.activity == "encode"}
    assert len(encodes) == len(groups)
    assert all(encodes[i] >= max(ready_s[tensor] for tensor in group) for i, group in enumerate(groups))


@given(one=cases(), host=curves)
def test_offload_picks_tensors_of_its_group_in_order(one: Case, host: Curve) -> None:
    groups = safusion_groups(one.profile, one.costs)
    for group, chosen in zip(groups, offload(one.profile, one.costs.encode, groups, host), strict=True):
        assert [tensor for tensor in group if tensor in chosen] == list(chosen)


@pytest.mark.parametrize("model", MODELS)
def test_optimal_copes_with_hundreds_of_tensors(model: str) -> None:
    """467 for ResNet-152; a search without exact pruning needs minutes and runs into the timeout."""
    one = published(model, 0.001)
    best_s = _optimal_s(one)
    for text in PLANNERS[:-1]:
        assert best_s <= one.finish_s(_planned(one, text)) * (1 + 1e-9)
