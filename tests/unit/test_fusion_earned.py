"""Messages that cost processor time are merged until merging no longer pays."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from sim.fusion_models import Case, case
from thinwire.fusion import Curve, Groups, merge_costly, optimal_groups, safusion_groups, unfused_groups
from thinwire.plan import Cluster, GroupWork, Message, simulate_groups

CROWDED = Cluster(world_size=4, ranks_per_machine=4, cores=2)


def _case(sizes: list[int]) -> Case:
    encode, message = Curve(((0, 1e-4), (10**6, 5e-3))), Curve(((0, 1e-3), (10**6, 0.05)))
    return case(sizes, [0.01 * (i + 1) for i in range(len(sizes))], encode, message, density=0.01)


def _finish_s(one: Case, cost_s: float) -> Callable[[Groups], float]:
    """Every message takes ``cost_s`` of processor time, which four ranks on two cores do not have to spare."""
    ready_s = dict(zip(one.profile.specs, one.profile.ready_s, strict=True))

    def finish_s(groups: Groups) -> float:
        works = [
            GroupWork(
                max(ready_s[tensor] for tensor in group),
                (one.costs.encode_s(group), 0.0),
                ((Message(one.costs.message_s(group), cpu_s=cost_s),),),
            )
            for group in groups
        ]
        return simulate_groups(works, one.profile.backward_s, CROWDED).finish_s

    return finish_s


def test_nothing_is_merged_where_it_does_not_shorten_the_step() -> None:
    groups = unfused_groups(_case([1000] * 6).profile.specs)
    assert merge_costly(groups, lambda _: 1.0) == groups
    assert merge_costly(groups, lambda merged: -len(merged)) == groups


def test_expensive_messages_become_few() -> None:
    one = _case([1000] * 12)
    assert len(merge_costly(unfused_groups(one.profile.specs), _finish_s(one, 0.05))) == 1


def test_a_merge_that_pays_only_after_another_is_found() -> None:
    """Merging 1 and 2 pays only once 2 and 3 are one: the second pass finds it."""
    groups = unfused_groups(_case([10, 20, 30, 40]).profile.specs)
    steps_s = {(1, 1, 1, 1): 5.0, (1, 1, 2): 4.0, (1, 3): 3.0}
    merged = merge_costly(groups, lambda plan: steps_s.get(tuple(len(group) for group in plan), 9.0))
    assert [len(group) for group in merged] == [1, 3]


@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=12), st.floats(0.0, 0.02))
def test_the_step_never_gets_longer_and_no_tensor_is_lost(sizes: list[int], cost_s: float) -> None:
    one = _case(sizes)
    finish_s = _finish_s(one, cost_s)
    for plan in (safusion_groups, optimal_groups):
        groups = plan(one.profile, one.costs)
        merged = merge_costly(groups, finish_s)
        assert [tensor for group in merged for tensor in group] == list(one.profile.specs)
        assert finish_s(merged) <= finish_s(groups)
