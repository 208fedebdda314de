"""SAFusion's rules, on an example worked by hand and on the authors' published timings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sim.fusion_models import BACKWARD_S, MODELS, PUBLISHED_PARAMETERS, Case, case, published
from thinwire.fusion import Curve, Groups, fixed_groups, optimal_groups, safusion_groups, unfused_groups

CASES = [(model, density) for model in MODELS for density in (0.01, 0.001)]


def _even_case(count: int, gap_s: float, message: Curve, encode_s: float = 0.0) -> Case:
    return case([1000] * count, [gap_s * (i + 1) for i in range(count)], Curve(((0.0, encode_s),)), message)


def _planned(one: Case, *, carry_backlog: bool = True) -> Groups:
    return safusion_groups(one.profile, one.costs, carry_backlog=carry_backlog)


def tensor_counts(groups: Groups) -> list[int]:
    return [len(group) for group in groups]


def test_an_example_by_hand() -> None:
    """A gradient each 1 s, messages of 4 s plus 1 s per tensor, encoding 0.5 s.

    Two tensors: 2 + 6 against 1 + 5 + 5 one by one, so the first group has two. Its message of 6 s leaves room for five
    (5 + 0.5 <= 6), whose message of 9 s leaves room for eight. Of 20 tensors five remain. What can hide messages is
    18 s of backward and 1.5 s of encoding: 6 + 9 fit, 6 + 9 + 12 do not, so behind the third group all is one anyway.
    """
    message = Curve(((4000.0, 5.0), (8000.0, 6.0)))
    one = _even_case(20, 1.0, message, encode_s=0.5)
    assert tensor_counts(_planned(one, carry_backlog=False)) == [2, 5, 8, 5]


def test_the_long_tail_becomes_one_group() -> None:
    """A gradient each 1 s, messages of 1.5 s, of two tensors 1.6 s.

    Two tensors: 2 + 1.6 against 1 + 1.5 + 1.5, so the first group has two. Then one each, since two gradients need 2 s.
    7 s of backward are left to hide messages: 1.6 + 3 * 1.5 fit, with a fourth they do not, and three tensors remain.
    """
    one = _even_case(9, 1.0, Curve(((4000.0, 1.5), (8000.0, 1.6), (12000.0, 50.0))))
    assert tensor_counts(_planned(one, carry_backlog=False)) == [2, 1, 1, 1, 1, 3]


def test_where_fusing_never_pays_nothing_is_fused() -> None:
    one = _even_case(6, 1.0, Curve(((4000.0, 0.1), (8000.0, 0.2))))
    assert tensor_counts(_planned(one)) == [1] * 6


def test_a_queue_on_the_wire_makes_room_for_larger_groups() -> None:
    """Pairs of a slow and a fast gradient: after the fast one, the paper's rule sees a short message, not the queue."""
    gaps = [0.9, 0.1] * 20
    ready = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    one = case([1000] * len(gaps), ready, Curve(((0.0, 0.0),)), Curve(((4000.0, 0.7), (8000.0, 0.75))))
    ours, paper = (_planned(one, carry_backlog=carry) for carry in (True, False))
    assert len(ours) < len(paper)
    assert one.finish_s(ours) < one.finish_s(paper)


@pytest.mark.parametrize("model", MODELS)
def test_generated_shapes_have_the_published_number_of_parameters(model: str) -> None:
    profile = published(model, 0.01).profile
    assert sum(tensor.numel for tensor in profile.specs) == PUBLISHED_PARAMETERS[model]
    assert profile.backward_s == pytest.approx(BACKWARD_S[model])


@pytest.mark.parametrize(("model", "density"), CASES)
def test_the_first_group_is_the_smallest_that_pays(model: str, density: float) -> None:
    one = published(model, density)

    def pays(size: int) -> bool:
        first = _without_encoding(one, size)
        return first.finish_s([first.profile.specs]) < first.finish_s(unfused_groups(first.profile.specs))

    first = len(_planned(one)[0])
    assert pays(first)
    assert not any(pays(size) for size in range(1, first))


def _without_encoding(one: Case, size: int) -> Case:
    tensors = one.profile.tensors[:size]
    profile = replace(one.profile, tensors=tensors, backward_s=tensors[-1].ready_s)
    return Case(profile, replace(one.costs, encode=Curve(((0.0, 0.0),))))


@pytest.mark.parametrize(("model", "density"), CASES)
def test_groups_fill_the_previous_message_and_no_more(model: str, density: float) -> None:
    one = published(model, density)
    groups = _planned(one, carry_backlog=False)
    tail = _tail_index(one, groups)
    for index in range(1, tail):
        start = sum(map(len, groups[:index]))
        budget_s = one.costs.message_s(groups[index - 1])
        end = start + len(groups[index])
        assert end == start + 1 or _demand_s(one, start, end) <= budget_s
        if index < len(groups) - 1:
            assert _demand_s(one, start, end + 1) > budget_s


def _demand_s(one: Case, start: int, end: int) -> float:
    """T_b + T_cp of the tensors from ``start`` to ``end``."""
    profile = one.profile
    return profile.ready_s[end - 1] - profile.ready_s[start - 1] + one.costs.encode_s(profile.specs[start:end])


def _tail_index(one: Case, groups: Groups) -> int:
    """The group that follows M', or the number of groups if there is no M' before the last."""
    profile, costs = one.profile, one.costs
    hiding_s = profile.backward_s - profile.ready_s[len(groups[0]) - 1] + sum(map(costs.encode_s, groups[1:]))
    for index in range(1, len(groups)):
        if sum(map(costs.message_s, groups[:index])) > hiding_s:
            return index
    return len(groups)


@pytest.mark.parametrize(("model", "density"), CASES)
@pytest.mark.parametrize("carry_backlog", [True, False])
def test_nothing_but_one_group_follows_when_nothing_can_be_hidden(
    model: str, density: float, carry_backlog: bool
) -> None:
    one = published(model, density)
    groups = _planned(one, carry_backlog=carry_backlog)
    assert _tail_index(one, groups) >= len(groups) - 1


@pytest.mark.parametrize(("model", "density"), CASES)
def test_the_wire_does_not_wait_for_a_group_that_could_be_smaller(model: str, density: float) -> None:
    one = published(model, density)
    groups = _planned(one)
    spans = one.simulated(groups).spans
    encoded_s, sent_s = ([span.end_s for span in spans if span.activity == lane] for lane in ("encode", "wire"))
    for index in range(1, _tail_index(one, groups)):
        assert len(groups[index]) == 1 or encoded_s[index] <= sent_s[index - 1]


@pytest.mark.parametrize(("model", "density"), CASES)
def test_published_timings_are_planned_nearly_optimally(model: str, density: float) -> None:
    one = published(model, density)
    specs, finish_s = one.profile.specs, one.finish_s(_planned(one))
    others: Sequence[Groups] = [unfused_groups(specs), fixed_groups(specs, 4 << 20)]
    assert all(finish_s < one.finish_s(groups) for groups in others)
    assert finish_s <= 1.06 * one.finish_s(optimal_groups(one.profile, one.costs))
