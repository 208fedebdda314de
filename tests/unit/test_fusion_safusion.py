"""SAFusion's rules, on an example worked by hand and on the authors' published timings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sim.fusion_models import BACKWARD_S, MODELS, PUBLISHED_PARAMETERS, published_profile
from thinwire.core import TensorSpec
from thinwire.fusion import (
    Curve,
    Groups,
    Profile,
    TensorProfile,
    fixed_groups,
    optimal_groups,
    safusion_groups,
    simulate_step,
    tensor_counts,
    unfused_groups,
)

CASES = [(model, density) for model in MODELS for density in (0.01, 0.001)]


def _even_profile(count: int, gap_s: float, message: Curve, encode_s: float = 0.0) -> Profile:
    tensors = tuple(TensorProfile(TensorSpec(f"t{i}", (1000,)), gap_s * (i + 1)) for i in range(count))
    return Profile(tensors, encode=Curve(((0.0, encode_s),)), message=message)


def test_an_example_by_hand() -> None:
    """A gradient each 1 s, messages of 4 s plus 1 s per tensor, encoding 0.5 s.

    Two tensors: 2 + 6 against 1 + 5 + 5 one by one, so the first group has two. Its message of 6 s leaves room for five
    (5 + 0.5 <= 6), whose message of 9 s leaves room for eight. Of 20 tensors five remain. What can hide messages is
    18 s of backward and 1.5 s of encoding: 6 + 9 fit, 6 + 9 + 12 do not, so behind the third group all is one anyway.
    """
    message = Curve(((4000.0, 5.0), (8000.0, 6.0)))
    profile = _even_profile(20, 1.0, message, encode_s=0.5)
    assert tensor_counts(safusion_groups(profile, carry_backlog=False)) == [2, 5, 8, 5]


def test_the_long_tail_becomes_one_group() -> None:
    """A gradient each 1 s, messages of 1.5 s, of two tensors 1.6 s.

    Two tensors: 2 + 1.6 against 1 + 1.5 + 1.5, so the first group has two. Then one each, since two gradients need 2 s.
    7 s of backward are left to hide messages: 1.6 + 3 * 1.5 fit, with a fourth they do not, and three tensors remain.
    """
    profile = _even_profile(9, 1.0, Curve(((4000.0, 1.5), (8000.0, 1.6), (12000.0, 50.0))))
    assert tensor_counts(safusion_groups(profile, carry_backlog=False)) == [2, 1, 1, 1, 1, 3]


def test_where_fusing_never_pays_nothing_is_fused() -> None:
    profile = _even_profile(6, 1.0, Curve(((4000.0, 0.1), (8000.0, 0.2))))
    assert tensor_counts(safusion_groups(profile)) == [1] * 6


def test_a_queue_on_the_wire_makes_room_for_larger_groups() -> None:
    """Pairs of a slow and a fast gradient: after the fast one, the paper's rule sees a short message, not the queue."""
    gaps = [0.9, 0.1] * 20
    ready = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    tensors = tuple(TensorProfile(TensorSpec(f"t{i}", (1000,)), at) for i, at in enumerate(ready))
    profile = Profile(tensors, encode=Curve(((0.0, 0.0),)), message=Curve(((4000.0, 0.7), (8000.0, 0.75))))
    ours, paper = (safusion_groups(profile, carry_backlog=carry) for carry in (True, False))
    assert len(ours) < len(paper)
    assert simulate_step(profile, ours).finish_s < simulate_step(profile, paper).finish_s


@pytest.mark.parametrize("model", MODELS)
def test_generated_shapes_have_the_published_number_of_parameters(model: str) -> None:
    profile = published_profile(model, 0.01)
    assert sum(tensor.numel for tensor in profile.specs) == PUBLISHED_PARAMETERS[model]
    assert profile.backward_s == pytest.approx(BACKWARD_S[model])


@pytest.mark.parametrize(("model", "density"), CASES)
def test_the_first_group_is_the_smallest_that_pays(model: str, density: float) -> None:
    profile = published_profile(model, density)

    def pays(size: int) -> bool:
        fused = simulate_step(_without_encoding(profile, size), [profile.specs[:size]]).finish_s
        single = simulate_step(_without_encoding(profile, size), unfused_groups(profile.specs[:size])).finish_s
        return fused < single

    first = len(safusion_groups(profile)[0])
    assert pays(first)
    assert not any(pays(size) for size in range(1, first))


def _without_encoding(profile: Profile, size: int) -> Profile:
    return Profile(
        profile.tensors[:size], Curve(((0.0, 0.0),)), profile.message, profile.density, profile.bytes_per_elem
    )


@pytest.mark.parametrize(("model", "density"), CASES)
def test_groups_fill_the_previous_message_and_no_more(model: str, density: float) -> None:
    profile = published_profile(model, density)
    groups = safusion_groups(profile, carry_backlog=False)
    tail = _tail_index(profile, groups)
    for index in range(1, tail):
        start = sum(map(len, groups[:index]))
        budget_s = profile.message_s(groups[index - 1])
        end = start + len(groups[index])
        assert end == start + 1 or _demand_s(profile, start, end) <= budget_s
        if index < len(groups) - 1:
            assert _demand_s(profile, start, end + 1) > budget_s


def _demand_s(profile: Profile, start: int, end: int) -> float:
    """T_b + T_cp of the tensors from ``start`` to ``end``."""
    return profile.ready_s[end - 1] - profile.ready_s[start - 1] + profile.encode_s(profile.specs[start:end])


def _tail_index(profile: Profile, groups: Groups) -> int:
    """The group that follows M', or the number of groups if there is no M' before the last."""
    hiding_s = profile.backward_s - profile.ready_s[len(groups[0]) - 1] + sum(map(profile.encode_s, groups[1:]))
    for index in range(1, len(groups)):
        if sum(map(profile.message_s, groups[:index])) > hiding_s:
            return index
    return len(groups)


@pytest.mark.parametrize(("model", "density"), CASES)
@pytest.mark.parametrize("carry_backlog", [True, False])
def test_nothing_but_one_group_follows_when_nothing_can_be_hidden(
    model: str, density: float, carry_backlog: bool
) -> None:
    profile = published_profile(model, density)
    groups = safusion_groups(profile, carry_backlog=carry_backlog)
    assert _tail_index(profile, groups) >= len(groups) - 1


@pytest.mark.parametrize(("model", "density"), CASES)
def test_the_wire_does_not_wait_for_a_group_that_could_be_smaller(model: str, density: float) -> None:
    profile = published_profile(model, density)
    groups = safusion_groups(profile)
    messages = simulate_step(profile, groups).messages
    for index in range(1, _tail_index(profile, groups)):
        assert len(groups[index]) == 1 or messages[index].encode_end_s <= messages[index - 1].message_end_s


@pytest.mark.parametrize(("model", "density"), CASES)
def test_published_timings_are_planned_nearly_optimally(model: str, density: float) -> None:
    profile = published_profile(model, density)
    finish_s = simulate_step(profile, safusion_groups(profile)).finish_s
    others: Sequence[Groups] = [unfused_groups(profile.specs), fixed_groups(profile.specs, 4 << 20)]
    assert all(finish_s < simulate_step(profile, groups).finish_s for groups in others)
    assert finish_s <= 1.06 * simulate_step(profile, optimal_groups(profile)).finish_s
